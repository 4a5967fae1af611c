"""What stands before training: the folder of classes, its split, and a look at a batch.

And at the end what all scripts share: files and folders that are written whole, the CPUs to use,
commands with a time limit. Needs nothing but the standard library.
"""

from __future__ import annotations  # so that check_setup.py can tell an old Python that it is old

import contextlib
import json
import math
import os
import random
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from torch import Tensor

IMAGE_ENDINGS = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff")

_TRAINING_NAMES = {"train", "training"}
_OTHER_PART_NAMES = {"val", "valid", "validation", "test", "testing"}


def read_split_data(
    root: str | os.PathLike,
    val_rate: float = 0.2,
    class_indices: str | os.PathLike | None = "class_indices.json",
    quiet: bool = False,
) -> tuple[list, list, int]:
    """List a folder-per-class data set and split it into a training and a validation part.

    Classes are the sub-folders of `root` in the order of their names, images the files right in
    them with one of `IMAGE_ENDINGS` in any case. Of each class, `int(n * val_rate)` images go
    to validation, drawn by a generator of its own: the split depends on the names alone, not on
    the order in which a file system lists them, nor on any random state, which stays as it was.

    Args:
        root: the data set's folder.
        val_rate: share of validation images, from 0 up to but not including 1.
        class_indices: where to write the class names, `{"0": "daisy", ...}`; None for nowhere.
        quiet: print neither counts nor warnings.

    Returns:
        `[train_paths, train_labels], [val_paths, val_labels], num_classes`. A path is
        `os.path.join(root, class, file)`, a label the class's position. Sorted by both.

    Raises:
        FileNotFoundError, NotADirectoryError: `root` is missing or no folder.
        ValueError: the folder is not a data set that can be trained and validated on.
        OSError: a folder cannot be read, or `class_indices` not written.
    """
    if not 0 <= val_rate < 1:
        raise ValueError(f"val_rate is {val_rate}, but must be at least 0 and less than 1")
    root = os.fspath(root)
    top = _list_root(root)
    classes = {name: _list_folder(os.path.join(root, name)) for name in sorted(top.folders)}
    _check_classes(root, classes)

    train, val = _split(root, classes, val_rate)
    _check_parts(root, classes, val_rate, train, val)
    if class_indices is not None:
        write_class_indices(list(classes), class_indices)
    if not quiet:
        _say(f"{len(train[0]) + len(val[0])} images were found in the dataset.")
        _say(f"{len(train[0])} images for training.")
        _say(f"{len(val[0])} images for validation.")
        for warning in _warnings(top, classes, val_rate):
            _say(f"Warning: {warning}")
    return train, val, len(classes)


def class_names(root: str | os.PathLike) -> list[str]:
    """Names of the class folders in `root`, sorted: position i is class number i.

    Looks at `root` alone, not into the classes. Raises FileNotFoundError, NotADirectoryError
    or ValueError as `read_split_data` does.
    """
    return [as_utf8(name) for name in sorted(_list_root(os.fspath(root)).folders)]


def as_utf8(name: str) -> str:
    """A file name as text: where Python took its bytes for ASCII, as with LC_ALL=C, read as UTF-8.

    What is not UTF-8 either stays as it is, with lone surrogates for the bytes.
    """
    try:
        return os.fsencode(name).decode("utf-8")
    except UnicodeError:
        return name


def readable(name: str, stream: TextIO | None = None) -> str:
    """A name, or a line with names in it, as it can be shown: no name must end a run.

    Escapes stand for line breaks and the like, for bytes that are not UTF-8, and, given a stream,
    for what its encoding cannot say.
    """
    text = "".join(char if char.isprintable() else char.encode("unicode_escape").decode()
                   for char in as_utf8(name))
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def write_class_indices(names: Sequence[str], path: str | os.PathLike) -> None:
    """Write `{"0": "daisy", ...}` to `path`, UTF-8, whole or not at all; OSError names the path."""
    content = {str(number): as_utf8(name) for number, name in enumerate(names)}
    with written_whole(path) as temporary:
        temporary.write_bytes(_utf8_json(content))


def check_class_count(given: int | None, names: Sequence[str]) -> int:
    """The number of classes: that of `names`, with which `given` must agree unless it is None.

    Raises ValueError with both numbers and the names where it does not.
    """
    if given is not None and given != len(names):
        raise ValueError(
            f"--num_classes is {given}, but the data has {len(names)} class folders: "
            f"{_some(names)}. Leave the option out or give {len(names)}."
        )
    return len(names)


def plot_data_loader_image(
    data_loader: Iterable,
    class_indices: str | os.PathLike = "class_indices.json",
    path: str | os.PathLike | None = None,
) -> None:
    """Draw the first batch of a data loader, at most 16 images, under their class names.

    Args:
        data_loader: gives `(images, labels)`: float `B x 3 x H x W`, normalised with ImageNet's
            mean and standard deviation, and integers `B`.
        class_indices: the file that `read_split_data` wrote.
        path: image file to write, for which no display is needed; None opens a window.
    """
    from matplotlib.figure import Figure

    with open(class_indices, encoding="utf-8") as file:
        names = json.load(file)
    images, labels = next(iter(data_loader))
    count = min(len(images), 16)
    columns = min(count, 4)
    rows = math.ceil(count / columns)
    if path is None:
        from matplotlib import pyplot

        figure = pyplot.figure(figsize=(3 * columns, 3 * rows))
    else:
        figure = Figure(figsize=(3 * columns, 3 * rows))
    for i in range(count):
        axes = figure.add_subplot(rows, columns, i + 1)
        axes.imshow(_denormalised(images[i]).tolist())
        # parse_math off: a class name with two "$" in it is no formula.
        axes.set_title(readable(names[str(int(labels[i]))]), parse_math=False)
        axes.axis("off")
    figure.tight_layout()
    if path is None:
        pyplot.show()
    else:
        figure.savefig(path)


@dataclass
class _Listing:
    """Names of what lies in a folder, hidden entries left out."""

    images: list[str] = field(default_factory=list)
    folders: list[str] = field(default_factory=list)
    dangling: list[str] = field(default_factory=list)  # links to nothing, or to themselves
    other_endings: Counter[str] = field(default_factory=Counter)


def _list_folder(folder: str) -> _Listing:
    listing = _Listing()
    # scandir tells files from folders without a system call for each, links excepted.
    # Sorted, because every machine must draw the same split whatever its listing order.
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        if entry.name.startswith("."):
            continue
        try:
            is_file, is_folder = entry.is_file(), entry.is_dir()
        except OSError:  # a link that goes round in a circle
            is_file = is_folder = False
        ending = os.path.splitext(entry.name)[1].lower()
        if is_folder:
            listing.folders.append(entry.name)
        elif not is_file and entry.is_symlink():
            listing.dangling.append(entry.name)
        elif is_file and ending in IMAGE_ENDINGS:
            listing.images.append(entry.name)
        else:
            listing.other_endings[ending] += 1
    return listing


def _list_root(root: str) -> _Listing:
    shown = readable(root)
    if not os.path.exists(root):
        raise FileNotFoundError(
            f"the data folder {shown} does not exist: give --data-path a folder with one "
            "sub-folder per class"
        )
    if not os.path.isdir(root):
        raise NotADirectoryError(
            f"the data path {shown} is not a folder: give --data-path a folder with one "
            "sub-folder per class"
        )
    top = _list_folder(root)
    if top.images:
        raise ValueError(
            f"{len(top.images)} images lie right in {shown} ({_some(top.images, 3)}): move them "
            f"into one sub-folder per class, as in {os.path.join(shown, 'daisy', '1.jpg')}"
        )
    if not top.folders:
        raise ValueError(f"the data folder {shown} is empty: it needs one sub-folder per class")
    lowered = {name.lower() for name in top.folders}
    if lowered <= _TRAINING_NAMES | _OTHER_PART_NAMES or (
        lowered & _TRAINING_NAMES and lowered & _OTHER_PART_NAMES
    ):
        raise ValueError(
            f"the data folder {shown} holds {_some(sorted(top.folders))} in place of classes: "
            "point --data-path at the one that holds the class folders (the split into "
            "training and validation is made here), or merge them"
        )
    return top


def _check_classes(root: str, classes: dict[str, _Listing]) -> None:
    problems = []
    for name, listing in classes.items():
        if listing.images:
            continue
        problem = f"class {readable(name)} has 0 images"
        if listing.folders:
            problem += f" but sub-folders ({_some(listing.folders, 3)}), which are not searched"
        if listing.dangling:
            problem += f" and {_count(len(listing.dangling), 'dangling link')}"
        if listing.other_endings:
            problem += f"; it has {_endings(listing.other_endings)}"
        problems.append(problem)
    if problems:
        more = f"; {len(problems) - 5} more classes are like that" if len(problems) > 5 else ""
        raise ValueError(
            f"in the data folder {readable(root)}: {'; '.join(problems[:5])}{more}. Images must "
            f"lie right in their class folder and end in {' '.join(IMAGE_ENDINGS)}; "
            "remove or fill such a folder, or point --data-path at the folder of the classes"
        )
    if len(classes) < 2:
        raise ValueError(
            f"the data folder {readable(root)} holds only one class ({_some(list(classes))}): "
            "a classifier needs at least two class folders"
        )


def _split(
    root: str, classes: dict[str, _Listing], val_rate: float
) -> tuple[list[list], list[list]]:
    # Its own generator leaves the caller's random state alone, and one for all classes in
    # order of their names is what the published split was drawn with.
    generator = random.Random(0)
    train: list[list] = [[], []]
    val: list[list] = [[], []]
    for label, (name, listing) in enumerate(classes.items()):
        drawn = set(generator.sample(listing.images, int(len(listing.images) * val_rate)))
        for image in listing.images:
            paths, labels = val if image in drawn else train
            paths.append(os.path.join(root, name, image))
            labels.append(label)
    return train, val


def _check_parts(root: str, classes: dict, val_rate: float, train: list, val: list) -> None:
    if train[0] and val[0]:
        return
    needed = _images_for_one_in_validation(val_rate)
    remedy = f"a class needs {needed} images to send one to validation" if needed else "raise it"
    raise ValueError(
        f"the data folder {readable(root)} has {len(train[0]) + len(val[0])} images in "
        f"{len(classes)} classes, which gives {len(train[0])} for training and {len(val[0])} for "
        f"validation at a validation share of {val_rate}: {remedy}"
    )


def _images_for_one_in_validation(val_rate: float) -> int | None:
    if val_rate == 0:
        return None
    needed = max(1, math.floor(1 / val_rate))
    while int(needed * val_rate) < 1:
        needed += 1
    return needed


def _warnings(top: _Listing, classes: dict[str, _Listing], val_rate: float) -> list[str]:
    lines = []
    for name, listing in classes.items():
        label = f"class {readable(name)}"
        if int(len(listing.images) * val_rate) == 0:
            lines.append(
                f"{label} has {_count(len(listing.images), 'image')}, none of them goes to "
                f"validation ({_images_for_one_in_validation(val_rate)} are needed for one)."
            )
        if listing.other_endings:
            lines.append(f"{label}: left out {_endings(listing.other_endings)}.")
        if listing.folders:
            lines.append(f"{label}: sub-folders are not searched ({_some(listing.folders, 3)}).")
    dangling = [*top.dangling]
    for name, listing in classes.items():
        dangling += [os.path.join(name, link) for link in listing.dangling]
    if dangling:
        links = _count(len(dangling), "dangling link")
        lines.append(f"{links} left out: {_some(dangling, 3)}.")
    return lines


def _endings(other_endings: Counter[str]) -> str:
    """For example "2 .txt files, 1 file without an ending"."""
    return ", ".join(
        _count(count, f"{readable(ending)} file") if ending
        else f"{_count(count, 'file')} without an ending"
        for ending, count in sorted(other_endings.items())
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _some(names: Sequence[str], limit: int = 10) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(readable(name) for name in names[:limit]) + more


def _say(line: str) -> None:
    with contextlib.suppress(OSError):  # a reader that has gone, as of "| head", must not end a run
        print(readable(line, sys.stdout))


def _utf8_json(value: dict) -> bytes:
    """Indented JSON. Lone surrogates, which UTF-8 has no bytes for, become JSON escapes, which
    load back as they were."""
    text = json.dumps(value, indent=4, ensure_ascii=False)
    text = re.sub("[\ud800-\udfff]", lambda found: f"\\u{ord(found[0]):04x}", text)
    return text.encode("utf-8")


def _denormalised(image: Tensor) -> Tensor:
    """Float `3 x H x W`, normalised with ImageNet's figures, to `H x W x 3` in 0..1."""
    mean = image.new_tensor((0.485, 0.456, 0.406)).view(3, 1, 1)
    std = image.new_tensor((0.229, 0.224, 0.225)).view(3, 1, 1)
    return (image * std + mean).clamp(0, 1).permute(1, 2, 0).cpu()


# ---- what all scripts share ------------------------------------------------------------------

# Files to remove should the process have to leave in the middle of writing them.
unfinished_files: set[Path] = set()


@contextlib.contextmanager
def written_whole(path: str | os.PathLike, option: str = "--output-dir") -> Iterator[Path]:
    """A temporary path beside `path`; renamed to it at the end, removed after any failure.

    `OSError` (full disk, read-only folder, file-size limit) names the path, and `option` as the
    remedy; the older file stays as it was, even through a power cut.
    """
    path = Path(path)
    # In the same folder, because a rename is atomic only within one file system.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    unfinished_files.add(temporary)
    try:
        yield temporary
        with open(temporary, "r+b") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:
        if isinstance(error, OSError) and error.errno is None:
            raise  # not of the system, but worded for the user already, as of a failed download
        # torch reports a failed write as RuntimeError, without the system's reason.
        raise write_error(path, error, option) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
        unfinished_files.discard(temporary)


def write_error(path: Path, error: Exception, option: str = "--output-dir") -> OSError:
    """A failed write as an `OSError` of the same number: which file, why, and what to do."""
    number = getattr(error, "errno", None)
    reason = getattr(error, "strerror", None) or (str(error).strip().splitlines() or [""])[0]
    with contextlib.suppress(OSError):
        if shutil.disk_usage(path.parent).free < 2**20:
            reason = "no space left on the device"
    # FileNotFoundError and so on: the class that Python has for the number.
    failure = type(OSError(number, reason))(
        f"cannot write {readable(str(path))}: {reason}. The older file, if any, is as it was; "
        f"free space there or choose another {option}")
    failure.errno = number
    return failure


def wrong_counts(folder: Path, expected: Mapping[str, int]) -> str:
    """What differs between the folder's classes and {class: number of images}; "" if nothing."""
    if not folder.is_dir():
        return f"no folder {folder.name}"
    found = {}
    for name in {*expected, *(entry.name for entry in folder.iterdir() if entry.is_dir())}:
        if not name.startswith("."):
            found[name] = sum(1 for path in (folder / name).glob("[!.]*")
                              if path.suffix.lower() in (".jpg", ".jpeg"))
    return ", ".join(f"{name} has {found[name]} images in place of {expected.get(name, 0)}"
                     for name in sorted(found) if found[name] != expected.get(name, 0))


def refuse_unless(output: Path, problem: str) -> None:
    """Raise ValueError where `output`, which exists, has a problem."""
    if problem:
        raise ValueError(f"{output} exists and is something else ({problem}). Move it away or "
                         "choose another place with --output")


def check_parent(output: Path) -> None:
    """Raise FileNotFoundError where there is no folder for `output` to lie in."""
    if not output.parent.is_dir():
        raise FileNotFoundError(f"{output.parent}: no such folder, so {output} cannot be made")


@contextlib.contextmanager
def staging_folder(output: Path) -> Iterator[Path]:
    """A private folder beside `output`, to be filled and renamed from; gone at the end.

    Beside it, because a rename is atomic only within one file system.
    """
    check_parent(output)
    with tempfile.TemporaryDirectory(prefix=f".{output.name}_", dir=output.parent) as folder:
        yield Path(folder)


_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")


def allowed_cpus() -> int:
    """CPUs that this process may use: its affinity mask, and what its container grants."""
    if hasattr(os, "sched_getaffinity"):
        cpus = len(os.sched_getaffinity(0))
    else:
        cpus = os.cpu_count() or 1
    return max(1, min([cpus, *_cgroup_limits()]))


def _cgroup_limits() -> Iterator[int]:
    """Whole CPUs that each control group around this process grants, of those that set a limit."""
    with contextlib.suppress(OSError):  # elsewhere than on Linux there are none
        for line in _OWN_CGROUPS.read_text().splitlines():
            _, controllers, place = line.split(":", 2)
            top, names = _CGROUPS, ["cpu.max"]
            if "cpu" in controllers.split(","):  # version 1, which gives each controller a tree
                top, names = _CGROUPS / "cpu", ["cpu.cfs_quota_us", "cpu.cfs_period_us"]
            elif controllers:
                continue
            # Each group on the way counts. In a container the top one is often its own, while
            # `place` is a name on the host, and is not there.
            parts = PurePosixPath(place).parts[1:]
            for depth in range(len(parts) + 1):
                folder = top.joinpath(*parts[:depth])
                with contextlib.suppress(OSError, ValueError):  # ValueError: "max", no limit
                    quota, period = " ".join((folder / name).read_text() for name in names).split()
                    if int(quota) > 0:  # version 1 says -1 for no limit
                        yield int(quota) // int(period)


TIMED_OUT = 124  # the status of a command that ran past its limit, as the shell's `timeout` has it
PATIENCE = 15.0  # seconds between the request to stop and the end


def run_limited(
    words: Iterable[object],
    seconds: float,
    folder: str | os.PathLike | None = None,
    env: Mapping[str, str] | None = None,
) -> tuple[int, str, float]:
    """Run a command for at most `seconds`; afterwards nothing of it is left.

    Args:
        words: program and arguments.
        seconds: time limit.
        folder: where to run it (default: here).
        env: all of its environment variables (default: those of this process).

    Returns:
        `(exit status, output, wall time in seconds)`; the status is TIMED_OUT after the limit,
        and the output holds what the command wrote as errors, too.
    """
    # A file, not a pipe: a process left over would hold a pipe open, and its reader with it.
    with tempfile.TemporaryFile() as output:
        start = time.perf_counter()
        # A session of its own, so that whatever the command starts can be ended with it.
        process = subprocess.Popen(
            [str(word) for word in words], stdin=subprocess.DEVNULL, stdout=output,
            stderr=subprocess.STDOUT, cwd=folder, env=env, start_new_session=True)
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            status = TIMED_OUT
        finally:
            wall = time.perf_counter() - start
            end_session(process)
        output.seek(0)
        return status, output.read().decode(errors="replace"), wall


def end_session(process: subprocess.Popen) -> None:
    """End what is left of a command and of the processes in its session.

    Workers that torchrun started have sessions of their own; they notice when it has gone.
    """
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)  # a launcher passes it on to its processes
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(PATIENCE)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
