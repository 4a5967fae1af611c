"""Check the links of the documents to lines of code, or set their line numbers right.

    python scripts/readme_links.py          # says which links are wrong; exit status 1 if any is
    python scripts/readme_links.py --fix    # writes the right line numbers

A link to a line carries the text that stands there: [`text`](file.py#L12).
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"\[(?P<text>[^\]]*)\]\((?P<target>[^)\s]+)\)")


class Link(NamedTuple):
    """A local link: its text without backticks, the file, and the line or None."""

    text: str
    file: str
    line: int | None


def documents() -> list[Path]:
    """The repository's documents that have links."""
    return [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/*.md"))]


def local_links(document: Path) -> Iterator[Link]:
    """The links of a document to files of the repository; comments are no part of it."""
    text = re.sub(r"<!--.*?-->", "", document.read_text(encoding="utf-8"), flags=re.DOTALL)
    for match in LINK.finditer(text):
        if re.match(r"\w+:|#", match["target"]):
            continue
        file, _, anchor = match["target"].partition("#")
        line = re.fullmatch(r"L(\d+)", anchor)
        yield Link(match["text"].strip("`"), file, int(line[1]) if line else None)


def lines_with(path: Path, text: str) -> list[int]:
    """Numbers of the lines of a file that hold the text."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [number for number, line in enumerate(lines, 1) if text in line]


def problems(document: Path) -> Iterator[str]:
    """What is wrong with the local links of a document, a line each."""
    for link in local_links(document):
        path = document.parent / link.file
        if not path.exists():
            yield f"{document.name}: {link.file} is not there"
        elif link.line is not None and link.line not in (found := lines_with(path, link.text)):
            yield (f"{document.name}: {link.file}#L{link.line} does not hold {link.text!r} "
                   f"(lines that do: {found}). python scripts/readme_links.py --fix")


def fix(document: Path) -> None:
    """Write the right line number where the text of a link stands on exactly one line."""
    text = document.read_text(encoding="utf-8")
    for link in local_links(document):
        path = document.parent / link.file
        if link.line is None or not path.is_file():
            continue
        found = lines_with(path, link.text)
        if len(found) == 1:
            text = text.replace(f"[`{link.text}`]({link.file}#L{link.line})",
                                f"[`{link.text}`]({link.file}#L{found[0]})")
    document.write_text(text, encoding="utf-8")


def main() -> int:
    """Check, or with --fix repair and check; returns the exit status."""
    if sys.argv[1:] == ["--fix"]:
        for document in documents():
            fix(document)
    found = [problem for document in documents() for problem in problems(document)]
    print("\n".join(found) or "all links are right")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
