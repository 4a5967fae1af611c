"""What all tests share."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

# Where the tests run in the background Ctrl-C is ignored, under nohup the terminal's end; what they
# start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# A test that itself runs under a launcher must not hand its place in that job to its scripts.
LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR",
                      "MASTER_PORT", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")


def pytest_collection_modifyitems(items):
    """Skip the tests that need more GPUs than there are."""
    count = int(os.environ.get("GPUS_FOR_TESTS", torch.cuda.device_count()))
    for name, needed in (("gpu", 1), ("multigpu", 2)):
        skip = pytest.mark.skip(reason=f"needs {needed} GPU(s), {count} visible")
        for item in items:
            if count < needed and name in item.keywords:
                item.add_marker(skip)


@pytest.fixture(scope="session")
def shared_data():
    """Folder of real photos and odd files beside the repository; skips where it is not there."""
    folder = ROOT.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"no {folder}")
    return folder


@pytest.fixture
def run_script(tmp_path):
    """``run_script("train_single_gpu.py", "--device", "cpu", ...)``: a command in ``tmp_path``.

    The first word is a script of the repository, "python" or "torchrun"; any word that names a
    script of the repository stands for its full path. Keyword arguments: ``timeout`` in seconds
    (120; the test fails where it runs out), ``status`` that the command must end with (0; None
    for any), ``env`` with variables to add, ``cwd``. Returns a CompletedProcess with text output,
    stderr apart from stdout. Nothing of the process group is left afterwards.
    """
    def run(*words, timeout=120, status=0, env=None, cwd=tmp_path):
        process = subprocess.Popen(
            full_command(words), cwd=cwd, env=clean_environment() | (env or {}), text=True,
            errors="replace", stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, start_new_session=True)
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            end_group(process)
            out, err = process.communicate()
            pytest.fail(f"{' '.join(words)}: not over after {timeout} s\n{out}\n{err}")
        finally:
            end_group(process)
        if status is not None:
            assert process.returncode == status, f"{' '.join(words)}\n{out}\n{err}"
        return subprocess.CompletedProcess(words, process.returncode, out, err)

    return run


def full_command(words):
    """The words as they can be run from any folder."""
    words = [str(ROOT / word) if str(word).endswith(".py") and (ROOT / word).is_file()
             else str(word) for word in words]
    start = {"python": [sys.executable],
             "torchrun": [sys.executable, "-m", "torch.distributed.run"]}
    if words[0] in start:
        return start[words[0]] + words[1:]
    return [sys.executable, *words] if words[0].endswith(".py") else words


def clean_environment():
    """This process's environment, without what a launcher put there."""
    kept = {name: value for name, value in os.environ.items()
            if name not in LAUNCHER_VARIABLES and not name.startswith("TORCHELASTIC_")}
    # Idle threads that spin would take the CPUs from the other processes of a test.
    return kept | {"OMP_WAIT_POLICY": "passive"}


def end_group(process):
    """Kill what is left of the group that the process leads."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


@pytest.fixture(scope="session")
def flowers(tmp_path_factory):
    """A drawn set of five classes, 75 small images: 60 for training, 15 for validation."""
    from prepare_data import draw_sample_set

    folder = tmp_path_factory.mktemp("data") / "flowers"
    draw_sample_set(str(folder), images=75, size=48)
    return folder
