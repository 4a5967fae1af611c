"""Jobs under SLURM, and on several machines, played by this one.

SLURM is the real one where scripts/slurm_for_tests.sh has started it, else those tests skip. Two
machines are two agents of torchrun: side by side, or each in a network namespace of its own.
"""

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT, clean_environment, full_command
from jobs import (
    SMALL,
    Job,
    all_gone,
    assert_saved_in_mid_epoch,
    command,
    descendants,
    load,
    records,
    same_tensors,
)

pytestmark = pytest.mark.slow
SLURM = {"SLURM_CONF": "/run/slurm_for_tests/slurm.conf"}
LONG = ("--epochs", "500", "--batch-size", "6")
# The batch file asks for GPUs and nodes that the tests do not have.
RESOURCES = ("--nodes=1", "--ntasks-per-node=2", "--cpus-per-task=1", "--gpus-per-node=0")


def slurm(*words):
    """The output of one of SLURM's commands."""
    return subprocess.run(words, env=clean_environment() | SLURM, check=True, timeout=60, text=True,
                          stdout=subprocess.PIPE).stdout


@pytest.fixture(scope="module")
def cluster():
    """Skips without SLURM."""
    try:
        os.stat(SLURM["SLURM_CONF"])  # without it srun looks for a server until it times out
        slurm("sinfo")
        slurm("srun", "--ntasks=2", "--immediate=30", "true")
    except (OSError, subprocess.SubprocessError):
        pytest.skip("no SLURM here: scripts/slurm_for_tests.sh starts one")


@pytest.fixture
def project(tmp_path, cluster):
    """A folder to submit from, with all that the batch file looks for."""
    folder = tmp_path / "project"
    activate = folder / ".venv" / "bin" / "activate"
    activate.parent.mkdir(parents=True)
    activate.write_text(f"PATH='{Path(sys.executable).parent}':$PATH\n")
    script = "train_multi_gpu_using_launch.py"
    (folder / script).symlink_to(ROOT / script)
    return folder


class BatchJob:
    """The repository's batch file as a job; ``with`` ends it whatever happens."""

    def __init__(self, folder, *options):
        self.log = folder / f"log_{time.monotonic_ns()}.txt"
        submitted = subprocess.run(
            ["sbatch", "--parsable", *RESOURCES, f"--output={self.log}",
             str(ROOT / "scripts" / "train.sbatch"), *SMALL, *options],
            cwd=folder, env=clean_environment() | SLURM, check=True, timeout=60, text=True,
            stdout=subprocess.PIPE)
        self.id = submitted.stdout.strip()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pids = self.processes()
        if self.fields()["JobState"] in ("PENDING", "RUNNING", "COMPLETING"):
            slurm("scancel", "--full", "--signal=KILL", self.id)
            self.wait()
        for pid in pids:  # whatever SLURM may have left
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def text(self):
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def fields(self):
        """What SLURM knows of the job."""
        return dict(word.split("=", 1) for word in
                    slurm("scontrol", "--oneliner", "show", "job", self.id).split() if "=" in word)

    def wait_for(self, text, seconds=120):
        """Until ``text`` stands in the output."""
        end = time.monotonic() + seconds
        while text not in self.text():
            if time.monotonic() > end or self.fields()["JobState"] in ("COMPLETED", "FAILED"):
                pytest.fail(f"no {text!r} in the output:\n{self.text()}")
            time.sleep(0.5)

    def wait(self, seconds=120):
        """The exit status of the batch file; the test fails where it does not come."""
        end = time.monotonic() + seconds
        while (fields := self.fields())["JobState"] in ("PENDING", "RUNNING", "COMPLETING"):
            if time.monotonic() > end:
                pytest.fail(f"job not over after {seconds} s:\n{self.text()}")
            time.sleep(0.5)
        return int(fields["ExitCode"].split(":")[0])

    def processes(self, task=None):
        """Process ids of the job's processes, or of one task's, the task itself first."""
        wanted = {f"SLURM_JOB_ID={self.id}".encode(), b"SLURM_CONF=" + SLURM["SLURM_CONF"].encode()}
        if task is not None:
            wanted.add(b"SLURM_PROCID=%d" % task)
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if wanted <= set((folder / "environ").read_bytes().split(b"\0")):
                    found.append(int(folder.name))
        return sorted(found)


def test_the_batch_file_trains(flowers, project):
    with BatchJob(project, "--data-path", str(flowers), "--epochs", "2", "--batch-size",
                  "6") as job:
        assert job.wait(240) == 0, job.text()
        text = job.text()
    assert "Process group: 2 processes, backend gloo" in text
    assert re.findall(r"^\[epoch (\d)\] accuracy: ", text, re.MULTILINE) == ["0", "1"]
    for rank in (0, 1):
        assert text.count(f"rank {rank} of 2 on ") == 1
    names = sorted(path.name for path in (project / "weights").iterdir())
    assert names == ["best.pth", "checkpoint.pth", "model-0.pth", "model-1.pth"]


def test_slurms_warning_saves_and_the_next_job_goes_on(flowers, project):
    options = ("--data-path", str(flowers), "--batch-size", "6", "--epochs")
    with BatchJob(project, *options, "500") as job:
        job.wait_for("[epoch 0]")
        pids = job.processes()
        signalled = time.time_ns()
        slurm("scancel", "--signal=USR1", job.id)  # as --signal does: to the steps alone
        assert job.wait() == 128 + signal.SIGUSR1, job.text()
        assert all_gone(pids)
        text = job.text()
    assert text.count("Stopped by SIGUSR1") == 1 and "Traceback" not in text
    assert "srun --ntasks=2 python train_multi" in text and "submit the batch file again" in text
    assert_saved_in_mid_epoch(project, signalled)
    epoch = load(project / "weights" / "checkpoint.pth")["epoch"]
    with BatchJob(project, *options, str(epoch + 1)) as job:
        assert job.wait() == 0, job.text()
        assert f"Going on from weights/checkpoint.pth: epoch {epoch}, " in job.text()
    assert [record["epoch"] for record in records(project)] == list(range(epoch + 1))


def test_a_killed_task_ends_the_job(flowers, project):
    with BatchJob(project, "--data-path", str(flowers), *LONG) as job:
        job.wait_for("[epoch 0]")
        pids = job.processes()
        os.kill(job.processes(task=1)[0], signal.SIGKILL)
        assert job.wait() != 0, job.text()
        assert all_gone(pids), pids


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def agent(host, port, *options, restarts=0):
    """The README's command for one of several boxes, two processes on each of two."""
    return ["torchrun", "--nnodes=2", "--nproc_per_node=2", f"--max-restarts={restarts}",
            "--rdzv_id=flowers", "--rdzv_backend=c10d", f"--rdzv_endpoint={host}:{port}",
            *command("launch", 2, *options)[3:]]


@contextlib.contextmanager
def two_agents(folder, *options, restarts=0):
    """Two agents of one job, joined over loopback, each with temporary folders of its own."""
    words = agent("127.0.0.1", free_port(), *options, restarts=restarts)
    with contextlib.ExitStack() as stack:
        jobs = []
        for name in ("node0", "node1"):
            (folder / name / "tmp").mkdir(parents=True)
            jobs.append(stack.enter_context(Job(folder / name, *words, env={
                "TMPDIR": str(folder / name / "tmp"), "OMP_NUM_THREADS": "2"})))
        yield jobs


def accuracies(*jobs):
    """The epochs' lines of all the jobs, without what differs between two equal runs."""
    lines = "\n".join(job.text() for job in jobs).splitlines()
    return [line.rsplit(", ", 2)[0] for line in lines if line.startswith("[epoch ")]


@pytest.fixture(scope="module")
def flawed(flowers, tmp_path_factory):
    """The flowers, two of them unreadable."""
    data = tmp_path_factory.mktemp("flawed") / "flowers"
    shutil.copytree(flowers, data)
    for path in sorted((data / "daisy").glob("*.jpg"))[:2]:
        path.write_bytes(path.read_bytes()[:300])
    return data


@pytest.fixture(scope="module")
def on_one_node(flawed, tmp_path_factory):
    """(accuracy lines, folder, options) of four processes under one agent."""
    folder = tmp_path_factory.mktemp("one_node")
    options = ("--data-path", str(flawed), "--epochs", "2", "--batch-size", "6",
               "--skip-bad-images", "--output-dir", str(folder / "out"))
    with Job(folder, *command("launch", 4, *options), env={"OMP_NUM_THREADS": "2"}) as job:
        assert job.wait(240) == 0, job.text()
        assert "2 bad images are left out" in job.text()
        return accuracies(job), folder / "out", options[:-1]


def assert_same_training(on_one_node, jobs, out):
    """All agents ended well, and their job was that of four processes under one agent."""
    lines, reference, _ = on_one_node
    assert [job.wait(240) for job in jobs] == [0, 0], "\n".join(job.text() for job in jobs)
    assert len(lines) == 2 and accuracies(*jobs) == lines
    assert sum(job.text().count("2 bad images are left out") for job in jobs) == 1
    ours, theirs = (load(folder / "weights" / "checkpoint.pth") for folder in (out, reference))
    assert ours["train_list"] == theirs["train_list"] and ours["world_size"] == 4
    assert same_tensors(ours["model"], theirs["model"])


def test_two_agents_train_as_one(on_one_node, tmp_path):
    with two_agents(tmp_path, *on_one_node[2], str(tmp_path / "out")) as jobs:
        assert_same_training(on_one_node, jobs, tmp_path / "out")
    for job in jobs:
        assert not list((job.folder / "tmp").glob("initial_weights*"))
        assert not (job.folder / "weights").exists()


@pytest.fixture
def machines(tmp_path):
    """Words that start a command on node0 and on node1; skips where that cannot be set up.

    Each has its own network, joined by one cable, its own name, which as on Debian leads to
    127.0.1.1, and its own folder ``tmp_path``/disk.
    """
    if os.geteuid() or not all(map(shutil.which, ("ip", "unshare"))):
        pytest.skip("network namespaces need root, ip and unshare")
    names = [f"flowers{os.getpid()}n{node}" for node in (0, 1)]
    disk = tmp_path / "disk"
    disk.mkdir()
    words = []
    try:
        for node, name in enumerate(names):
            run_ip("netns", "add", name)
            hosts = tmp_path / f"hosts{node}"
            hosts.write_text(f"127.0.0.1 localhost\n127.0.1.1 node{node}\n"
                             f"192.168.77.{2 - node} node{1 - node}\n")
            own = tmp_path / f"disk{node}"
            own.mkdir()
            words.append(["ip", "netns", "exec", name, "unshare", "--uts", "sh", "-ec", (
                f"hostname node{node}; mount --bind '{hosts}' /etc/hosts; "
                f"mount --bind '{own}' '{disk}'; exec \"$@\""), "sh"])
        run_ip("link", "add", "cable", "netns", names[0], "type", "veth", "peer", "name", "cable",
               "netns", names[1])
        for node, name in enumerate(names):
            run_ip("-n", name, "address", "add", f"192.168.77.{node + 1}/24", "dev", "cable")
            for device in ("lo", "cable"):
                run_ip("-n", name, "link", "set", device, "up")
            run_ip("-n", name, "route", "add", "default", "dev", "cable")
        if subprocess.run([*words[0], "true"], capture_output=True).returncode:
            pytest.skip("cannot mount in a namespace here")
        yield words
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def run_ip(*words):
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"ip {' '.join(words)}: {done.stderr.strip()}")


def test_two_machines_train_as_one(on_one_node, machines, tmp_path):
    disk = tmp_path / "disk"
    words = full_command(agent("node0", 29500, *on_one_node[2], str(disk / "out")))
    env = {"TMPDIR": str(disk), "OMP_NUM_THREADS": "2"}
    with Job(tmp_path / "node0", *machines[0], *words, env=env) as first, \
            Job(tmp_path / "node1", *machines[1], *words, env=env) as second:
        assert first.wait(240) == second.wait(240) == 0, first.text() + second.text()
        (out,) = tmp_path.glob("disk[01]/out")  # rank 0's machine alone writes
        assert_same_training(on_one_node, (first, second), out)
    assert " on node0 joins " in first.text() and " on node1 joins " in second.text()
    assert not list(tmp_path.glob("disk[01]/initial_weights*"))


@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_agent_ends_the_other(flowers, tmp_path, killed):
    """The agent that holds torchrun's store, or the other one."""
    with two_agents(tmp_path, "--data-path", str(flowers), *LONG, "--output-dir",
                    str(tmp_path / "out")) as jobs:
        wait_for_epoch(jobs, 0)
        pids = [descendants(job.process.pid) for job in jobs]
        for pid in (jobs[killed].process.pid, *jobs[killed].ranks()):
            os.kill(pid, signal.SIGKILL)
        assert jobs[1 - killed].wait(120) != 0
        assert all_gone(sum(pids, []), 30)


def wait_for_epoch(jobs, epoch, seconds=120):
    """Until the job of which only one agent prints has finished an epoch."""
    end = time.monotonic() + seconds
    while not any(f"[epoch {epoch}]" in job.text() for job in jobs):
        if time.monotonic() > end or any(job.process.poll() is not None for job in jobs):
            pytest.fail("\n".join(job.text() for job in jobs))
        time.sleep(0.2)


def test_agents_restart_together(flowers, tmp_path):
    """Only the agent whose rank was killed counts a restart; the other one's ranks join it."""
    options = ("--data-path", str(flowers), "--batch-size", "6", "--resume", "auto",
               "--startup-timeout", "60", "--output-dir", str(tmp_path / "out"), "--epochs", "6")
    with two_agents(tmp_path, *options, restarts=1) as jobs:
        wait_for_epoch(jobs, 1)
        other = next(job for job in jobs if "[epoch 0]" not in job.text())
        os.kill(other.ranks()[0], signal.SIGKILL)
        text = "\n".join(job.text() for job in jobs if job.wait(240) == 0)
    assert text.count("Process group: 4 processes") == 2
    assert text.count(" of 4 on ") == 8, "every rank joins twice, and none a third time"
    assert text.count("[epoch 5]") == 1 and text.count("Going on from") == 1


def test_resume_refuses_another_list_of_images(flowers, tmp_path):
    """With --skip-bad-images the list is what could be read, and that has changed."""
    data = tmp_path / "data"
    shutil.copytree(flowers, data)
    words = command("single", 1, "--data-path", str(data), "--batch-size", "6", "--resume", "auto",
                    "--skip-bad-images", "--epochs")
    with Job(tmp_path, *words, "1") as job:
        assert job.wait(240) == 0, job.text()
    images = load(tmp_path / "weights" / "checkpoint.pth")["train_list"]["count"]
    for path in sorted((data / "daisy").glob("*.jpg"))[:6]:  # not all of them for validation
        path.write_bytes(path.read_bytes()[:300])
    with Job(tmp_path, *words, "2") as job:
        assert job.wait(240) == 1, job.text()
        text = job.text()
    assert f"training images were {images} files, now " in text and "Traceback" not in text
    assert not (tmp_path / "weights" / "model-1.pth").exists()
