"""Training runs as tests start them: small, on the CPU, watched and always ended."""

import contextlib
import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
import torchvision
from conftest import ROOT, clean_environment, end_group, full_command
from PIL import Image
from torchvision import transforms

from utils import read_split_data

SMALL = ("--device", "cpu", "--model", "resnet18", "--image-size", "32", "--weights", "",
         "--workers", "1")


def command(launcher, processes, *options):
    """The words that start a training run: launcher is "single", "launch" or "spawn"."""
    if launcher == "single":
        return ["train_single_gpu.py", *SMALL, *options]
    if launcher == "spawn":
        return ["train_multi_gpu_using_spawn.py", "--world-size", str(processes), *SMALL, *options]
    return ["torchrun", "--standalone", f"--nproc_per_node={processes}",
            "train_multi_gpu_using_launch.py", *SMALL, *options]


class Job:
    """A command in the background, its output in a file; ``with`` ends it whatever happens."""

    def __init__(self, folder, *words, env=None):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.log = folder, folder / "log.txt"
        self.began = time.monotonic()
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(
                full_command(words), cwd=folder, env=clean_environment() | (env or {}),
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        ranks = self.ranks()
        end_group(self.process)
        self.process.wait()
        for pid in ranks:  # ranks lead process groups of their own
            with contextlib.suppress(ProcessLookupError):
                os.killpg(os.getpgid(pid), signal.SIGKILL)

    def text(self):
        return self.log.read_text(errors="replace")

    def wait_for(self, text, seconds=120):
        """Until ``text`` stands in the output."""
        end = time.monotonic() + seconds
        while text not in self.text():
            if self.process.poll() is not None or time.monotonic() > end:
                pytest.fail(f"no {text!r} in the output:\n{self.text()}")
            time.sleep(0.05)

    def wait(self, seconds=120):
        """The exit status; the test fails where it does not come."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            pytest.fail(f"not over after {seconds} s:\n{self.text()}")

    def ranks(self):
        """Process ids of the ranks, by rank, as their environment or their order tells."""
        spawned = [pid for pid in descendants(self.process.pid)
                   if b"spawn_main" in cmdline(pid) and parent(pid) == self.process.pid]
        if spawned:
            return spawned
        found = {}
        for pid in descendants(self.process.pid):
            with contextlib.suppress(OSError):
                environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                parent_is_rank = parent(pid) in found.values()
                for word in environment:
                    if word.startswith(b"RANK=") and not parent_is_rank:
                        found.setdefault(int(word[5:]), pid)
        return [found[rank] for rank in sorted(found)]


def planted(folder, code):
    """Variables of an environment in which every Python process begins with ``code``."""
    (folder / "planted").mkdir(parents=True)
    (folder / "planted" / "sitecustomize.py").write_text(code)
    return {"PYTHONPATH": str(folder / "planted"), "PLANTED_ROOT": str(ROOT)}


def cmdline(pid):
    """The command line of a process, empty where it is gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def parent(pid):
    """Process id of the parent."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def descendants(pid):
    """All processes below ``pid``, parents before their children."""
    children = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError, ValueError):
                children.setdefault(parent(entry.name), []).append(int(entry.name))
    found = [pid]
    for one in found:
        found.extend(sorted(children.get(one, [])))
    return found[1:]


def all_gone(pids, seconds=15):
    """True once none of the processes exists any more (or is but a corpse)."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if not any(is_running(pid) for pid in pids):
            return True
        time.sleep(0.1)
    return False


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def records(folder):
    """The lines of the only run's metrics.jsonl, as dicts."""
    (path,) = (folder / "runs").glob("*/metrics.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def load(path):
    return torch.load(path, map_location="cpu", weights_only=True)


def same_tensors(a, b):
    """True where two state dicts hold the same names and the same bits."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def assert_saved_in_mid_epoch(folder, signalled):
    """The checkpoint was written because of a signal, sent at ``signalled`` (time.time_ns).

    Returns its position. A run always stops after a step, so an epoch's own checkpoint, whose
    position is 0, is not what the signal saved.
    """
    path = folder / "weights" / "checkpoint.pth"
    # The file system's clock may be some milliseconds behind; steps and writing take longer.
    assert path.stat().st_mtime_ns > signalled - 10_000_000
    position = load(path)["position"]
    assert position > 0
    return position


def independent_matrix(weights, data, size=32, model="resnet18"):
    """Confusion matrix (row = true class) of a weight file, image by image.

    By torchvision's network and transforms, which share nothing with the trainer's.
    """
    _, (paths, labels), classes = read_split_data(data, class_indices=None, quiet=True)
    net = torchvision.models.get_model(model, weights=None, num_classes=classes)
    net.load_state_dict(load(weights), strict=True)
    net.eval()
    view = transforms.Compose([
        transforms.Resize(round(size * 256 / 224)), transforms.CenterCrop(size),
        transforms.ToTensor(),
        transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))])
    matrix = [[0] * classes for _ in range(classes)]
    with torch.no_grad():
        for path, label in zip(paths, labels, strict=True):
            with Image.open(path) as image:
                matrix[label][int(net(view(image.convert("RGB"))[None]).argmax())] += 1
    return matrix
