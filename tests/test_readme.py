"""What the documents say is so: options and defaults, links, commands, the example."""

import argparse
import re
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

import readme_links  # noqa: E402

from multi_train_utils import options  # noqa: E402

README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCUMENTS = [path.relative_to(ROOT).as_posix() for path in readme_links.documents()]
SCRIPTS = ("single", "launch", "spawn")
BATCH_FILE = ROOT / "scripts" / "train.sbatch"


def table_rows():
    """{option: (default, scripts)} as the README's table has it."""
    rows = {}
    for line in README.splitlines():
        if line.startswith("| `--"):
            flags, default, scripts, _ = (cell.strip() for cell in line.strip("|").split("|"))
            scripts = SCRIPTS if scripts == "all" else tuple(scripts.split(", "))
            for flag in re.findall(r"`(--[\w-]+)`", flags):
                assert flag not in rows, f"{flag} stands twice in the table"
                rows[flag] = default, scripts
    return rows


def parser_of(script, monkeypatch):
    """The parser that parse_args makes for a script."""
    made = []

    def keep(self, argv, namespace):
        made.append(self)
        return namespace

    monkeypatch.setattr(options.Parser, "parse_args", keep)
    options.parse_args(script, [])
    return made[0]


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_table_of_options_is_the_parsers(script, monkeypatch):
    actions = {flag: action for action in parser_of(script, monkeypatch)._actions
               for flag in action.option_strings if flag.startswith("--") and flag != "--help"}
    rows = {flag: default for flag, (default, scripts) in table_rows().items() if script in scripts}
    assert sorted(rows) == sorted(actions)
    for flag, default in rows.items():
        expected = actions[flag].default
        if expected is argparse.SUPPRESS:
            continue  # the negative form of an option, in the row of the positive one
        if expected is None:
            assert default and not re.fullmatch("`[^`]*`", default), f"{flag} has no fixed default"
        else:
            assert default == f"`{expected}`", flag


def test_every_line_with_options_has_known_ones():
    known = {*table_rows(), "--help", "--flag"}
    for script in ("predict.py", "plot_results.py", "check_setup.py", "prepare_data.py"):
        known |= set(re.findall(r'"(--[\w-]+)"', (ROOT / script).read_text(encoding="utf-8")))
    launchers = {"--standalone", "--nproc_per_node", "--nnodes", "--rdzv_id", "--rdzv_backend",
                 "--rdzv_endpoint", "--max-restarts", "--master_port", "--logdir", "--shm-size",
                 "--kill-on-bad-exit", "--signals-to-handle"}
    slurm = set(re.findall(r"#SBATCH (--[\w-]+)", BATCH_FILE.read_text(encoding="utf-8")))
    assert set(re.findall(r"(?<![\w-])--[a-zA-Z][\w-]+", README)) <= known | launchers | slurm


@pytest.mark.parametrize("document", DOCUMENTS)
def test_local_links_lead_somewhere_and_links_to_lines_to_what_they_name(document):
    assert list(readme_links.problems(ROOT / document)) == []


def test_the_five_details_link_to_lines():
    details = README.split("## Five details")[1].split("\n## ")[0]
    lines = re.findall(r"\n(\d)\. |#(L)\d+\)", details)
    numbers = "".join(number or line for number, line in lines)
    assert re.fullmatch("1L+2L+3L+4L+5L+", numbers)


def test_a_link_that_rotted_is_found_and_repaired(tmp_path):
    (tmp_path / "code.py").write_text("first = 1\nsecond = 2\n", encoding="utf-8")
    document = tmp_path / "doc.md"
    document.write_text("[`second = 2`](code.py#L1) [there](code.py) <!-- [no](no.py) -->",
                        encoding="utf-8")
    assert len(list(readme_links.problems(document))) == 1
    readme_links.fix(document)
    assert "(code.py#L2)" in document.read_text(encoding="utf-8")
    assert list(readme_links.problems(document)) == []
    document.write_text("[gone](gone.py)", encoding="utf-8")
    assert len(list(readme_links.problems(document))) == 1


def test_headings_that_are_linked_to_exist():
    headings = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")
                for heading in re.findall(r"^#+ (.+)$", README, flags=re.MULTILINE)}
    assert set(re.findall(r"\]\(#([^)]+)\)", README)) <= headings


@pytest.mark.parametrize("document", DOCUMENTS)
def test_make_targets_in_the_documents_exist(document):
    text = (ROOT / document).read_text(encoding="utf-8")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, flags=re.MULTILINE))
    assert set(re.findall(r"(?:^|`)make ([a-z-]+)", text, flags=re.MULTILINE)) <= targets


@pytest.mark.parametrize("path", [ROOT / name for name in DOCUMENTS] + sorted(
    path for folder in ("", "multi_train_utils", "benchmarks", "scripts")
    for path in (ROOT / folder).glob("*.*") if path.suffix in (".py", ".sh")), ids=lambda p: p.name)
def test_commands_of_one_box_can_run_twice_and_none_is_of_the_old_launcher(path):
    """The default port is taken where a second job starts on the same box."""
    text = path.read_text(encoding="utf-8")
    for command in re.findall(r"torchrun(?: |\w+=\S+)*--.*", text):
        if "nproc_per_node" in command and "--nnodes" not in command:
            assert "--standalone" in command
    assert not re.search(r"python3? -m torch\.distributed", text)


@pytest.mark.parametrize("words", re.findall(r"^python (\w+\.py)", README, flags=re.MULTILINE))
def test_scripts_in_the_commands_exist(words):
    assert (ROOT / words).is_file()


def test_requirements_are_ranges_that_hold_here():
    from packaging.requirements import Requirement  # comes with pytest

    lines = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    wanted = [Requirement(line) for line in lines if line.strip() and not line.startswith("#")]
    assert {"torch", "torchvision", "tqdm", "Pillow"} <= {entry.name for entry in wanted}
    for entry in wanted:
        assert not any(part.operator in ("==", "===") for part in entry.specifier), entry
        assert entry.specifier.contains(version(entry.name), prereleases=True), entry


def test_the_example_with_an_own_model_learns_and_counts(tmp_path, run_script):
    for name in ("distributed_utils.py", "train_eval_utils.py"):
        shutil.copy(ROOT / "multi_train_utils" / name, tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert len(blocks) == 1
    (tmp_path / "own.py").write_text(blocks[0], encoding="utf-8")
    for command in (["python"], ["torchrun", "--standalone", "--nproc_per_node=2"]):
        done = run_script(*command, "own.py", env={"CUDA_VISIBLE_DEVICES": ""})
        lines = re.findall(r"epoch (\d): loss ([\d.]+), (\d+) of 2000 correct", done.stdout)
        assert [epoch for epoch, _, _ in lines] == ["0", "1", "2"]
        assert float(lines[2][1]) < float(lines[0][1])
        assert 1900 < int(lines[2][2]) <= 2000


def test_the_batch_file_is_the_one_that_the_readme_submits():
    assert "\nsbatch scripts/train.sbatch --data-path" in README
    assert subprocess.run(["bash", "-n", BATCH_FILE]).returncode == 0
    text = BATCH_FILE.read_text(encoding="utf-8")
    assert text.startswith("#!/")  # else sbatch refuses it
    (seconds,) = re.findall(r"^#SBATCH --signal=USR1@(\d+)$", text, flags=re.MULTILINE)
    assert f"{seconds} seconds before the time limit" in README
    assert re.search(r"^srun --kill-on-bad-exit=1 python train_multi_gpu.*--resume auto", text,
                     flags=re.MULTILINE)
