"""Whatever ends one process ends the job: soon, with a reason, and nothing is lost.

docs/reliability.md has the table of these tests. Times are checked only as limits after which a
job counts as hanging; with RELIABILITY_LOG=file each is added there, one JSON a line.
"""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import time
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from conftest import clean_environment, full_command
from jobs import (
    Job,
    all_gone,
    assert_saved_in_mid_epoch,
    command,
    descendants,
    load,
    planted,
    records,
)
from torch.multiprocessing import reductions
from torch.utils.data import DataLoader, Dataset

from multi_train_utils.safety.ending import speak
from multi_train_utils.safety.guard import Guard

pytestmark = pytest.mark.slow
LAUNCHERS = ["spawn", "launch"]
LONG = ("--epochs", "500", "--batch-size", "6")


@contextlib.contextmanager
def training(folder, launcher, *options, processes=2, data, env=None, after="[epoch 0]"):
    """A run that has saved its first epoch; afterwards no process of it may be left."""
    words = command(launcher, processes, "--data-path", str(data), *LONG, *options)
    with Job(folder, *words, env=env) as job:
        job.wait_for(after)
        end = time.monotonic() + 60  # it is written beside the next epoch
        while not (folder / "weights" / "checkpoint.pth").exists():
            assert job.process.poll() is None and time.monotonic() < end, job.text()
            time.sleep(0.02)
        yield job


def assert_ended(job, pids, status=None, seconds=15):
    """The job, and every process of it, ends within ``seconds`` from now."""
    began = time.monotonic()
    code = job.wait(seconds)
    assert code != 0 if status is None else code == status, job.text()
    assert all_gone(pids, max(1.0, began + seconds - time.monotonic())), [
        Path(f"/proc/{p}/cmdline").read_bytes() for p in pids if Path(f"/proc/{p}").exists()]
    note(job, code, time.monotonic() - began)


def assert_fails(job, seconds):
    """The job ends with status 1 within ``seconds``, and none of it is left."""
    assert job.wait(seconds) == 1, job.text()
    assert not job.ranks()
    note(job, 1, time.monotonic() - job.began)


def note(job, code, seconds):
    """Add to the log, where one is wanted, how the job ended and when it was gone."""
    if "RELIABILITY_LOG" in os.environ:
        line = {"test": os.environ["PYTEST_CURRENT_TEST"].split("::")[1].split(" ")[0],
                "seconds": round(seconds, 1), "status": code,
                "last_line": job.text().strip().splitlines()[-1]}
        with open(os.environ["RELIABILITY_LOG"], "a") as log:
            log.write(json.dumps(line) + "\n")


def assert_whole(folder):
    """The newest checkpoint can be read, and no half file lies beside it; returns its epoch."""
    assert not list((folder / "weights").glob(".*.tmp"))
    epoch = load(folder / "weights" / "checkpoint.pth")["epoch"]
    assert epoch >= 1
    return epoch


def assert_resumable(folder, data):
    """The newest checkpoint is whole, and a run goes on from it."""
    epoch = assert_whole(folder)
    words = command("single", 1, "--data-path", str(data), *LONG, "--resume", "auto",
                    "--output-dir", str(folder), "--epochs", str(epoch + 1))
    with Job(folder / "resumed", *words) as job:
        assert job.wait(120) == 0, job.text()
        assert "Going on from" in job.text() and f"[epoch {epoch}]" in job.text()


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_ends_the_job(flowers, tmp_path, launcher, rank):
    with training(tmp_path, launcher, data=flowers) as job:
        pids = descendants(job.process.pid)
        os.kill(job.ranks()[rank], signal.SIGKILL)
        assert_ended(job, pids)
        if launcher == "spawn":
            assert f"rank {rank} of 2 was killed by SIGKILL" in job.text().splitlines()[-1]
        else:
            assert f"rank      : {rank} " in job.text().split("Root Cause")[1]
        assert "Stopped by" not in job.text()
    assert_resumable(tmp_path, flowers)


@pytest.mark.parametrize("launcher", ["single", *LAUNCHERS])
def test_a_killed_loader_worker_ends_the_job(flowers, tmp_path, launcher):
    processes = 1 if launcher == "single" else 2
    with training(tmp_path, launcher, data=flowers, processes=processes) as job:
        pids = descendants(job.process.pid)
        rank = job.process.pid if launcher == "single" else job.ranks()[1]
        os.kill(descendants(rank)[0], signal.SIGKILL)
        assert_ended(job, pids)
        text = job.text()
        assert text.count("a loader worker died") >= 1 and "--workers 0" in text


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_ranks_end_with_a_killed_launcher(flowers, tmp_path, launcher):
    with training(tmp_path, launcher, data=flowers) as job:
        pids = descendants(job.process.pid)
        os.kill(job.process.pid, signal.SIGKILL)
        assert_ended(job, pids, -signal.SIGKILL)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_ranks_end_with_a_launcher_killed_while_they_start(flowers, tmp_path, launcher):
    with Job(tmp_path, *command(launcher, 2, "--data-path", str(flowers), *LONG)) as job:
        while len(job.ranks()) < 2:
            time.sleep(0.01)
        pids = descendants(job.process.pid)
        os.kill(job.process.pid, signal.SIGKILL)  # they have hardly begun to import torch
        assert_ended(job, pids, -signal.SIGKILL)


@pytest.mark.parametrize("launcher", ["single", *LAUNCHERS])
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_says_how_to_go_on(flowers, tmp_path, launcher, signum):
    processes = 1 if launcher == "single" else 2
    with training(tmp_path, launcher, data=flowers, processes=processes) as job:
        pids = descendants(job.process.pid)
        signalled = time.time_ns()
        os.kill(job.process.pid, signum)
        assert_ended(job, pids, None if launcher == "launch" else 128 + signum)
        assert job.text().count("Stopped by") == 1 and "--resume auto" in job.text()
    assert_saved_in_mid_epoch(tmp_path, signalled)
    assert_resumable(tmp_path, flowers)


def test_a_signal_to_one_rank_stops_all_in_good_order(flowers, tmp_path):
    with training(tmp_path, "spawn", data=flowers) as job:
        pids = descendants(job.process.pid)
        signalled = time.time_ns()
        os.kill(job.ranks()[1], signal.SIGUSR1)
        assert_ended(job, pids, 128 + signal.SIGUSR1)
        assert "Stopped by SIGUSR1" in job.text()
    assert_saved_in_mid_epoch(tmp_path, signalled)
    assert_resumable(tmp_path, flowers)


@pytest.mark.parametrize("launcher", ["single", *LAUNCHERS])
def test_a_closed_terminal_stops_all_in_good_order(flowers, tmp_path, launcher):
    words = command(launcher, 1 if launcher == "single" else 2, "--data-path", str(flowers), *LONG)
    process, terminal = os.forkpty()
    if process == 0:
        os.chdir(tmp_path)
        words = full_command(words)
        os.execve(words[0], words, clean_environment())
    text = ""
    while "[epoch 1]" not in text:
        text += os.read(terminal, 10_000).decode()
    pids = descendants(process)
    signalled = time.time_ns()
    os.close(terminal)
    end = time.monotonic() + 15
    while not (gone := os.waitpid(process, os.WNOHANG))[0] and time.monotonic() < end:
        time.sleep(0.05)
    os.kill(process, signal.SIGKILL) if not gone[0] else None
    assert os.waitstatus_to_exitcode(gone[1]) == (1 if launcher == "launch" else 128 + 1), text
    assert all_gone(pids)
    assert_saved_in_mid_epoch(tmp_path, signalled)
    assert_resumable(tmp_path, flowers)


def test_output_that_nobody_reads_any_more_does_not_end_training(flowers, tmp_path):
    words = command("single", 1, "--data-path", str(flowers), "--epochs", "2")
    with subprocess.Popen(full_command(words), cwd=tmp_path, env=clean_environment(), text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(120) == 0, process.stderr.read()
    assert [line["epoch"] for line in records(tmp_path)] == [0, 1]


def test_nohup_is_heeded(flowers, tmp_path):
    words = ["nohup", *full_command(command("spawn", 2, "--data-path", str(flowers), *LONG))]
    with Job(tmp_path, *words) as job:
        job.wait_for("[epoch 0]")
        for pid in (job.process.pid, *job.ranks()):
            os.kill(pid, signal.SIGHUP)
        job.wait_for(f"[epoch {job.text().count('accuracy:') + 2}]")
        signalled = time.time_ns()
        os.kill(job.process.pid, signal.SIGTERM)
        assert job.wait(30) == 143
    assert_saved_in_mid_epoch(tmp_path, signalled)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_at_once(flowers, tmp_path, signum):
    """A frozen peer keeps the ranks from agreeing: the second signal does not wait for it."""
    with training(tmp_path, "spawn", data=flowers) as job:
        pids = descendants(job.process.pid)
        os.kill(job.ranks()[1], signal.SIGSTOP)
        os.kill(job.process.pid, signum)
        time.sleep(1)
        os.kill(job.process.pid, signum)
        assert_ended(job, pids, 128 + signum, seconds=8)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_frozen_peer_is_named(flowers, tmp_path, launcher):
    with training(tmp_path, launcher, "--timeout", "5", data=flowers) as job:
        pids = descendants(job.process.pid)
        os.kill(job.ranks()[1], signal.SIGSTOP)
        # torchrun waits 30 s for the frozen one before it kills it.
        assert_ended(job, pids, 1, seconds=5 + (45 if launcher == "launch" else 15))
        assert job.text().count("rank 1 does not answer") >= 1


@pytest.mark.parametrize("launcher", ["single", *LAUNCHERS])
def test_a_job_that_stood_still_as_a_whole_goes_on(flowers, tmp_path, launcher):
    """Ctrl-Z, a suspended batch job, a closed lid: nobody was silent, all slept."""
    processes = 1 if launcher == "single" else 2
    with training(tmp_path, launcher, "--timeout", "4", data=flowers, processes=processes) as job:
        pids = [job.process.pid, *descendants(job.process.pid)]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        done = job.text().count("accuracy:")
        time.sleep(9)  # more than twice as long as a peer may be silent
        for pid in reversed(pids):
            os.kill(pid, signal.SIGCONT)
        job.wait_for(f"[epoch {done + 1}]")
        os.kill(job.process.pid, signal.SIGTERM)
        assert job.wait(30) == (1 if launcher == "launch" else 143), job.text()
        assert "Stopped by SIGTERM" in job.text() and "does not answer" not in job.text()


@pytest.mark.multigpu
@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP])
def test_on_two_gpus(flowers, tmp_path, launcher, signum):
    """A rank killed or frozen beside NCCL's collectives, and a stop in good order."""
    with training(tmp_path, launcher, "--device", "cuda", "--timeout", "5", data=flowers) as job:
        pids = descendants(job.process.pid)
        whom = job.process.pid if signum == signal.SIGTERM else job.ranks()[1]
        signalled = time.time_ns()
        os.kill(whom, signum)
        frozen = signum == signal.SIGSTOP
        assert_ended(job, pids, seconds=5 + (45 if frozen and launcher == "launch" else 15))
        assert ("rank 1 does not answer" in job.text()) == frozen
        assert ("Stopped by SIGTERM" in job.text()) == (signum == signal.SIGTERM)
    assert_whole(tmp_path)
    if signum == signal.SIGTERM:
        assert_saved_in_mid_epoch(tmp_path, signalled)


def test_a_peer_that_never_comes(flowers, tmp_path):
    words = command("launch", 2, "--data-path", str(flowers), "--startup-timeout", "5")[3:]
    env = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
           "MASTER_PORT": "29783"}
    with Job(tmp_path, *words, env=env) as job:
        job.wait_for("127.0.0.1:29783")  # said while it waits, not when it gives up
        assert_fails(job, 60)
        text = job.text()
    assert text.startswith("rank 0 of 2 on ")
    assert "only 1 of 2 ranks joined" in text and "Traceback" not in text


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("how", ["deleted", "cut"])
def test_an_image_that_breaks_while_training_is_named(flowers, tmp_path, launcher, how):
    data = tmp_path / "data"
    shutil.copytree(flowers, data)
    with training(tmp_path / "out", launcher, data=data) as job:
        pids = descendants(job.process.pid)
        lost = sorted((data / "tulips").glob("*.jpg"))
        for path in lost:
            # In the place of the whole file at once, as a copy that broke off would be.
            half = path.with_suffix(".half")
            half.write_bytes(path.read_bytes()[:400])
            half.replace(path) if how == "cut" else (path.unlink(), half.unlink())
        assert_ended(job, pids)
        assert any(str(path) in job.text() for path in lost)
    assert_whole(tmp_path / "out")


# Read by every Python of a job: what goes wrong in one rank, in its second epoch of five steps.
# Planted in what the trainer calls of torch, and so wherever it calls it from.
PLANTED = """
import os
import torch
from torch import nn
from torch.nn import functional
from torch.optim.optimizer import register_optimizer_step_post_hook

where, steps = os.environ["PLANTED"], []

def here(count):
    return len(steps) >= count and torch.distributed.get_rank() == int(where != "save")

def fail():
    print(f"planted: {where} is met", flush=True)
    raise RuntimeError(f"planted in {where}")

def stepped(*_):
    steps.append(1)
    if where == "after_step" and here(6):
        fail()

def watch(module, name, count):
    original = getattr(module, name)

    def watched(*args, **kwargs):
        if not here(count):
            return original(*args, **kwargs)
        if where != "nan":
            fail()
        print("planted: nan is met", flush=True)
        return original(*args, **kwargs) * float("nan")

    setattr(module, name, watched)

register_optimizer_step_post_hook(stepped)
if where == "nan":
    watch(functional, "cross_entropy", 5)
elif where == "validate":
    watch(nn.Module, "eval", 10)
elif where == "save":
    watch(torch, "get_rng_state", 10)
"""


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("where", ["after_step", "validate", "save", "nan"])
def test_a_failure_of_one_rank_ends_all_and_is_said_once(flowers, tmp_path, launcher, where):
    env = planted(tmp_path, PLANTED) | {"PLANTED": where}
    with training(tmp_path / "out", launcher, data=flowers, env=env) as job:
        pids = descendants(job.process.pid)
        # Counted from the first epoch's line, so with the second epoch that leads to the failure.
        assert_ended(job, pids, 1, seconds=30)
        cause = "epoch 1, step 0: the loss is nan" if where == "nan" else f"planted in {where}"
        (said,) = [line for line in job.text().splitlines() if line.startswith("error (")]
        assert f"(rank {int(where != 'save')} of 2 on" in said and cause in said
        assert f"planted: {where} is met" in job.text()
        assert "PeerFailed" not in job.text()
    assert_whole(tmp_path / "out")


STALLED = """
import os, sys, time
sys.path.insert(0, os.environ["PLANTED_ROOT"])
from multi_train_utils.data_pipeline import TrainingImages

original = TrainingImages.__getitem__

def stalled(self, key):
    if key[0] == 1 and os.environ["RANK"] == "1":
        os.write(1, b"planted: a worker stalls\\n")
        time.sleep(3600)
    return original(self, key)

TrainingImages.__getitem__ = stalled
"""


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_loader_workers_that_send_nothing_are_not_waited_for(flowers, tmp_path, launcher):
    env = planted(tmp_path, STALLED)
    with training(tmp_path / "out", launcher, "--timeout", "5", data=flowers, env=env) as job:
        pids = descendants(job.process.pid)
        assert_ended(job, pids, 1, seconds=20)
        assert "planted: a worker stalls" in job.text()
        (said,) = [line for line in job.text().splitlines() if line.startswith("error (")]
        assert "(rank 1 of 2 on" in said and "the loader workers sent nothing" in said
        assert "--workers 0" in said


STUCK = """
import os, time
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

evaluation, steps = nn.Module.eval, []

def stuck(self):
    if len(steps) == 10:  # at the end of the second epoch
        os.write(1, f"rank {torch.distributed.get_rank()} waits for its GPU\\n".encode())
        time.sleep(3600)
    return evaluation(self)

register_optimizer_step_post_hook(lambda *_: steps.append(1))
nn.Module.eval = stuck
"""


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("frozen", [True, False])
def test_a_rank_whose_gpu_stands_still_ends(flowers, tmp_path, launcher, frozen):
    """The main thread waits where no exception reaches it: for a collective's result."""
    env = planted(tmp_path, STUCK)
    with training(tmp_path / "out", launcher, "--timeout", "5", data=flowers, env=env) as job:
        for rank in range(2):
            job.wait_for(f"rank {rank} waits for its GPU")
        pids = descendants(job.process.pid)
        if frozen:
            os.kill(job.ranks()[1], signal.SIGSTOP)
        assert_ended(job, pids, 1, seconds=5 + (45 if frozen and launcher == "launch" else 15))
        (said,) = [line for line in job.text().splitlines() if line.startswith("error (")]
        assert ("rank 1 does not answer" if frozen else "has not finished a collective") in said
    assert_whole(tmp_path / "out")


@pytest.mark.parametrize("world_size", [1, 2])
def test_only_a_rank_with_peers_is_given_up(world_size, monkeypatch):
    """One process under torchrun comes to no meetings: watched, it would be taken for stuck."""
    guard = Guard(Namespace(rank=0, world_size=world_size, timeout=60, startup_timeout=60))
    expected = []
    monkeypatch.setattr(guard._watch, "expect", lambda *words: expected.append(words))
    guard._training = True
    guard.moving()
    assert expected == [("the GPU", 62 if world_size > 1 else None)]


class Answers(Dataset):
    """A set whose worker sends tensors, which the main process must fetch from it."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        if index > 2:
            raise ConnectionResetError("the reader's own")
        return torch.zeros(3)


@pytest.mark.parametrize("how", ["reset", "own"])
def test_a_worker_that_dies_while_its_batch_is_fetched_is_told_from_other_errors(
        monkeypatch, capsys, how):
    batches = iter(DataLoader(Answers(), num_workers=1, multiprocessing_context="fork"))

    def reset(*_):
        raise ConnectionResetError(104, "Connection reset by peer")

    if how == "reset":
        monkeypatch.setattr(reductions, "rebuild_storage_fd", reset)
    with pytest.raises(ConnectionResetError) as caught:
        list(batches)
    speak(caught.value, Namespace())
    assert ("a loader worker died" in capsys.readouterr().err) == (how == "reset")


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_taken_port_is_named(flowers, tmp_path, launcher):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        words = command(launcher, 2, "--data-path", str(flowers))
        if launcher == "spawn":
            words += ["--master-port", port]
        else:
            words[1] = f"--master_port={port}"
        with Job(tmp_path, *words) as job:
            assert_fails(job, 60)
            assert port in job.text() or "EADDRINUSE" in job.text()
            assert launcher == "launch" or "--master-port" in job.text().splitlines()[-1]


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_loss_that_is_not_finite_ends_all_ranks(flowers, tmp_path, launcher):
    words = command(launcher, 2, "--data-path", str(flowers), *LONG, "--lr", "1e12")
    with Job(tmp_path, *words) as job:
        assert_fails(job, 120)
        text = job.text()
    ours = text.split("torch.distributed.elastic")[0] if launcher == "launch" else text
    assert ours.count("the loss is") == 1 and "epoch 0, step" in ours and "--lr" in ours
    assert "accuracy:" not in text and "destroy_process_group" not in text
    assert not list((tmp_path / "weights").glob("model-*"))


@contextlib.contextmanager
def mounted(folder, *options):
    """A tmpfs on ``folder``; needs root, as mode bits would not stop it."""
    folder.mkdir(parents=True, exist_ok=True)
    made = subprocess.run(["mount", "-t", "tmpfs", *options, "tmpfs", folder],
                          capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"cannot mount here: {made.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=False)


@pytest.mark.parametrize("launcher", ["single", *LAUNCHERS])
def test_a_full_disk_names_the_file_and_keeps_the_older_one(flowers, tmp_path, launcher):
    processes = 1 if launcher == "single" else 2
    with mounted(tmp_path / "small", "-o", "size=240m") as small:
        words = command(launcher, processes, "--data-path", str(flowers), *LONG, "--output-dir",
                        str(small))
        with Job(tmp_path / "job", *words) as job:
            assert_fails(job, 120)
            text = job.text()
        assert "cannot write" in text and "no space left" in text and str(small) in text
        assert_whole(small)


def test_a_full_temporary_folder_does_not_end_training(flowers, tmp_path):
    words = command("spawn", 2, "--data-path", str(flowers), "--epochs", "1")
    with mounted(tmp_path / "small", "-o", "size=1m") as small:
        with Job(tmp_path / "job", *words, env={"TMPDIR": str(small)}) as job:
            assert job.wait(120) == 0, job.text()
        assert not list(small.glob("initial_weights*"))
    assert (tmp_path / "job" / "weights" / "model-0.pth").is_file()


def test_a_read_only_output_folder(flowers, tmp_path):
    with mounted(tmp_path / "fixed", "-o", "ro") as fixed:
        words = command("single", 1, "--data-path", str(flowers), "--output-dir", str(fixed))
        with Job(tmp_path / "job", *words) as job:
            assert_fails(job, 60)
            text = job.text()
        assert "cannot write" in text and str(fixed) in text and "--output-dir" in text
        assert "Traceback" not in text


def test_an_output_folder_that_is_a_file(flowers, tmp_path):
    (tmp_path / "taken").touch()
    words = command("spawn", 2, "--data-path", str(flowers), "--output-dir", "taken")
    with Job(tmp_path, *words) as job:
        assert_fails(job, 60)
        assert job.text().splitlines()[-1].endswith("--output-dir taken is a file: give a folder, "
                                                    "or a name that is still free")


def test_records_that_cannot_be_written_do_not_end_training(flowers, tmp_path):
    (tmp_path / "runs").write_text("a file where the folder should be")
    words = command("single", 1, "--data-path", str(flowers), "--epochs", "1")
    with Job(tmp_path, *words) as job:
        assert job.wait(120) == 0, job.text()
        assert job.text().count("records in") == 1
    assert (tmp_path / "weights" / "model-0.pth").is_file()


def test_little_shared_memory(flowers, tmp_path):
    words = command("single", 1, "--data-path", str(flowers), "--epochs", "1")
    script = ("mount -t tmpfs -o size=200k tmpfs /dev/shm && exec \"$@\"")
    start = ["unshare", "-m", "sh", "-c", script, "sh"]
    if subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode:
        pytest.skip("cannot make a mount namespace here")
    with Job(tmp_path / "given", *start, *full_command(words)) as job:
        assert_fails(job, 60)
        assert "/dev/shm" in job.text() and "--workers 0" in job.text()
    free = full_command(words)
    at = free.index("--workers")
    del free[at:at + 2]
    with Job(tmp_path / "chosen", *start, *free) as job:
        assert job.wait(120) == 0, job.text()
        assert "--workers 0" in job.text()


def test_two_jobs_at_once_and_in_one_folder(flowers, tmp_path):
    words = command("spawn", 2, "--data-path", str(flowers), *LONG)
    with Job(tmp_path / "one", *words) as one, Job(tmp_path / "two", *words) as two:
        one.wait_for("[epoch 1]")
        two.wait_for("[epoch 1]")
        third = command("single", 1, "--data-path", str(flowers), "--output-dir",
                        str(tmp_path / "one"))
        with Job(tmp_path / "three", *third) as job:
            assert_fails(job, 90)
            assert "another run is writing" in job.text() and "--output-dir" in job.text()
        assert one.process.poll() is None and two.process.poll() is None
        signalled = time.time_ns()
        for job in (one, two):
            os.kill(job.process.pid, signal.SIGTERM)
        assert one.wait(30) == two.wait(30) == 143
    for job in (one, two):
        assert_saved_in_mid_epoch(job.folder, signalled)
