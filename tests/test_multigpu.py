"""What needs several GPUs: true numbers under every launcher, the same training at any size.

Run as a script by torchrun, this file is also the worker that computes the losses of one training
on two processes and on one. On the CPU the same code is tried under the mark `slow`.
"""

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import time
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from test_gpu import (
    GPU,
    ROOT,
    SIZE,
    assert_counts_are_true,
    assert_same_training,
    draw_set,
    leaves,
    run_command,
    run_options,
)
from torch import nn
from torch.utils.data import BatchSampler

from model import resnet18, resnet34
from multi_train_utils.augmentation import Normalizer
from multi_train_utils.data_pipeline import EpochSampler, ImageList, TrainingImages, collate
from multi_train_utils.distributed_utils import (
    cleanup,
    init_distributed_mode,
    reduce_value,
    select_gpu,
)
from multi_train_utils.options import parse_args
from multi_train_utils.safety.ending import run
from multi_train_utils.safety.rendezvous import meet
from multi_train_utils.speed.captured_step import CapturedStep, capture_stream, warm_up
from multi_train_utils.train_eval_utils import TrainStep, keep_frozen_statistics
from multi_train_utils.trainer import ddp_options, make_optimizer
from utils import read_split_data

GPUS = int(os.environ.get("GPUS_FOR_TESTS", torch.cuda.device_count()))
TWO_GPUS = [pytest.mark.multigpu, pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")]
CPU = pytest.param("cpu", marks=pytest.mark.slow)
CUDA = pytest.param("cuda", marks=TWO_GPUS)
TORCHRUN = ["-m", "torch.distributed.run", "--standalone"]
LAUNCH = ROOT / "train_multi_gpu_using_launch.py"
SPAWN = ROOT / "train_multi_gpu_using_spawn.py"


# ---- the worker: the same training on two processes and on one -------------------------------

GLOBAL_BATCH = 32


def freeze_batch_norm(model, images):
    """Keep the statistics of one batch: BatchNorm that is the same in every process."""
    layers = [layer for layer in model.modules() if isinstance(layer, nn.BatchNorm2d)]
    for layer in layers:
        layer.momentum = 1.0
    with torch.no_grad():
        model.train()(images)
    for layer in layers:
        layer.requires_grad_(False)


def losses(args, images, replicas, dtype, batch_norm, steps):
    """Mean loss of each global step of 32 images, on ``replicas`` processes.

    ``batch_norm`` is "sync", "local" (statistics of the own batch) or "frozen". With ``replicas``
    1 every process trains on the whole batch by itself.
    """
    device = torch.device(args.device)
    torch.manual_seed(0)
    make, size = (resnet34, SIZE) if device.type == "cuda" else (resnet18, 32)
    model = make(num_classes=5).to(device, dtype)
    normalize, dataset = Normalizer(device), TrainingImages(images, size, seed=0)

    def prepare(pixels):
        return normalize(pixels.to(device)).to(dtype)

    if batch_norm == "frozen":
        freeze_batch_norm(model, prepare(collate([dataset[0, i] for i in range(32)])[0]))
    if replicas > 1:
        if batch_norm == "sync":
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        model = wrapped(model, args)
    settings = Namespace(lr=0.001, weight_decay=0.005, nesterov=False)
    step = TrainStep(model, make_optimizer(model, settings, device), device, prepare=prepare)
    keep_frozen_statistics(model.train())
    sampler = EpochSampler(dataset, replicas, args.rank if replicas > 1 else 0, seed=0)
    values = []
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        for keys in BatchSampler(sampler, GLOBAL_BATCH // replicas, drop_last=True):
            loss = step(*collate([dataset[key] for key in keys])[:2])
            values.append(float(reduce_value(loss) if replicas > 1 else loss))
            if len(values) == steps:
                return values


def wrapped(model, args):
    """As the trainer does it."""
    return nn.parallel.DistributedDataParallel(
        model, device_ids=None if args.gpu is None else [args.gpu], **ddp_options())


def state_after_one_step(args, images, captured):
    """The model's state after one step of DistributedDataParallel with SyncBatchNorm."""
    device = torch.device(args.device)
    torch.manual_seed(0)
    model = resnet34(num_classes=5).to(device, memory_format=torch.channels_last)
    with capture_stream(device) as stream:
        model = wrapped(nn.SyncBatchNorm.convert_sync_batchnorm(model), args)
    settings = Namespace(lr=0.001, weight_decay=0.005, nesterov=False)
    dataset = TrainingImages(images, SIZE, seed=args.rank)
    step = TrainStep(model, make_optimizer(model, settings, device), device,
                     prepare=Normalizer(device))
    batch = [t.to(device) for t in collate([dataset[0, i] for i in range(16)])[:2]]
    call = step
    model.train()
    if captured:
        call = CapturedStep(step, batch, stream)
    else:
        warm_up(step, batch, 1)
    call(*batch)
    torch.cuda.synchronize()
    return {name: value.clone() for name, value in model.module.state_dict().items()}


def worker(args):
    """Write what the tests below look at to ``args.out``, as JSON."""
    init_distributed_mode(args, join=meet)
    images = ImageList(*read_split_data(args.data_path, class_indices=None, quiet=True)[0])
    torch.use_deterministic_algorithms(True)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    shared = "sync" if args.device == "cuda" else "frozen"  # no SyncBatchNorm on CPUs
    steps = 20 if args.device == "cuda" else 4
    found = {
        "two": losses(args, images, 2, torch.float64, shared, steps),
        "one": losses(args, images, 1, torch.float64, shared, steps),
        "two fp32": losses(args, images, 2, torch.float32, shared, 1),
        "one fp32": losses(args, images, 1, torch.float32, shared, 1),
        "two local": losses(args, images, 2, torch.float32, "local", 1),
        "one local": losses(args, images, 1, torch.float32, "local", 1)}
    if args.device == "cuda":
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.allow_tf32 = True
        eager, captured = (state_after_one_step(args, images, way) for way in (False, True))
        found["captured"] = max(float((eager[name].double() - captured[name].double())
                                      .abs().max()) for name in eager)
    if args.rank == 0:
        Path(args.out).write_text(json.dumps(found), encoding="utf-8")
    cleanup()


# ---- tests -----------------------------------------------------------------------------------

@pytest.fixture(scope="module", params=[CPU, CUDA])
def device(request):
    return request.param


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return draw_set(tmp_path_factory.mktemp("drawn"))


@pytest.fixture(scope="module")
def found(device, data, tmp_path_factory):
    """What the worker found on two processes."""
    folder = tmp_path_factory.mktemp("worker")
    status, output = run_command(
        [*TORCHRUN, "--nproc_per_node=2", __file__, folder / "found.json", "--device", device,
         "--data-path", data], folder / "run")
    assert status == 0, output
    return json.loads((folder / "found.json").read_text())


def test_two_processes_train_as_one_does(found, device):
    assert len(found["one"]) == (20 if device == "cuda" else 4)
    differences = [abs(a - b) for a, b in zip(found["two"], found["one"], strict=True)]
    assert max(differences) <= 1e-9, differences
    assert abs(found["two fp32"][0] - found["one fp32"][0]) <= 1e-5


def test_without_sync_batch_norm_they_do_not(found):
    assert abs(found["two local"][0] - found["one local"][0]) > 1e-3


@pytest.mark.parametrize("device", [CUDA], indirect=True)
def test_captured_step_is_near_the_eager_one_on_two_gpus(found):
    assert found["captured"] <= 1e-5


# ---- whole runs ------------------------------------------------------------------------------

# Runs a script; each rank says on which GPUs it has a context when its training is done.
CONTEXTS = """
import ctypes, os, runpy, sys
from multi_train_utils.records.records import Records
finish = Records.finish
def tell(self):
    finish(self)
    cuda, found = ctypes.CDLL("libcuda.so.1"), []
    count, handle, flags, active = (ctypes.c_int() for _ in range(4))
    assert cuda.cuDeviceGetCount(ctypes.byref(count)) == 0
    for gpu in range(count.value):
        assert cuda.cuDeviceGet(ctypes.byref(handle), gpu) == 0
        assert cuda.cuDevicePrimaryCtxGetState(
            handle, ctypes.byref(flags), ctypes.byref(active)) == 0
        found += [gpu] if active.value else []
    sys.stdout.write(f"pid {os.getpid()} has contexts on {found}\\n")
    sys.stdout.flush()
Records.finish = tell
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def gpus_of_processes():
    """[(pid, GPU), ...] as nvidia-smi shows them now; some containers hide the processes."""
    words = ["nvidia-smi", "--query-compute-apps=pid,gpu_uuid", "--format=csv,noheader"]
    if shutil.which(words[0]) is None:
        return []
    output = subprocess.run(words, capture_output=True, text=True, timeout=60).stdout
    return [(int(pid), gpu) for pid, gpu in re.findall(r"^(\d+), (GPU-\S+)$", output, re.MULTILINE)]


def run_watched(words, folder):
    """run_command's result, and all that gpus_of_processes saw meanwhile."""
    seen = set()
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(run_command, words, folder)
        while not job.done():
            seen.update(gpus_of_processes())
            time.sleep(0.2)
    return (*job.result(), seen)


@pytest.fixture(scope="module")
def runs(device, data, tmp_path_factory):
    """{name: (exit status, output, folder)} of runs on two processes, 20 steps each."""
    root = tmp_path_factory.mktemp("runs")
    torch.manual_seed(0)
    weights = resnet34(num_classes=5).to(device).state_dict()  # on a GPU: saved from cuda:0
    torch.save(weights, root / "weights.pth")
    (root / "contexts.py").write_text(CONTEXTS)
    options = run_options(data, device, "--weights", root / "weights.pth", "--batch-size", 4)
    two = [*TORCHRUN, "--nproc_per_node=2"]
    commands = {"sync": [*two, LAUNCH, *options, "--deterministic"],
                "spawn": [SPAWN, "--world-size", 2, *options]}
    if device == "cuda":
        commands["sync"].insert(len(two), root / "contexts.py")
        commands["eager"] = [*two, LAUNCH, *options, "--deterministic", "--no-cuda-graph"]
        commands["local"] = [*two, LAUNCH, *options, "--no-syncBN"]
    done = {}
    for name, words in commands.items():
        status, output, seen = run_watched(words, root / name)
        done[name] = status, output, root / name
        done["processes seen"] = done.get("processes seen", set()) | seen
    return done


@pytest.mark.parametrize("name", ["sync", "spawn", "local", "eager"])
def test_printed_accuracy_is_that_of_the_saved_file(runs, name, device, data):
    if name not in runs:
        pytest.skip("needs GPUs")
    status, output, folder = runs[name]
    assert status == 0, output
    assert_counts_are_true(output, folder, data, device)


@pytest.mark.parametrize("device", [CUDA], indirect=True)
def test_captured_and_eager_runs_are_the_same_bit_for_bit(runs):
    assert "captured as one CUDA graph" in runs["sync"][1]
    assert "captured as one CUDA graph" not in runs["eager"][1]
    assert_same_training(runs["sync"][2], runs["eager"][2], epoch=1)


@pytest.mark.parametrize("device", [CUDA], indirect=True)
def test_each_process_stands_on_one_gpu(runs):
    lines = re.findall(r"pid (\d+) has contexts on \[(.*?)\]", runs["sync"][1])
    assert sorted(gpus for _, gpus in lines) == ["0", "1"], runs["sync"][1]
    seen = runs["processes seen"]
    for pid, _ in lines:  # where nvidia-smi shows our processes, it must agree
        assert len([gpu for number, gpu in seen if number == int(pid)]) <= 1


@pytest.mark.parametrize("device", [CUDA], indirect=True)
def test_saved_files_open_on_a_machine_without_a_gpu(runs):
    content = leaves(torch.load(runs["sync"][2] / "weights" / "checkpoint.pth",
                                weights_only=True))
    assert {value.device.type for _, value in content
            if isinstance(value, torch.Tensor)} == {"cpu"}


# ---- too few GPUs ----------------------------------------------------------------------------

def assert_says_what_is_missing(text):
    assert re.search(r"\b2 processes", text) and re.search(r"\b1 visible GPU", text), text
    assert "CUDA_VISIBLE_DEVICES" in text


@pytest.mark.parametrize("words", [
    pytest.param([*TORCHRUN, "--nproc_per_node=2", LAUNCH], id="torchrun", marks=GPU),
    pytest.param([SPAWN, "--world-size", 2], id="spawn", marks=GPU)])
def test_more_processes_than_gpus(words, data, tmp_path, monkeypatch):
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", first)
    status, output = run_command([*words, *run_options(data, "cuda")], tmp_path / "run")
    assert status not in (0, 2)
    assert_says_what_is_missing(output)


def test_more_processes_than_gpus_says_both_numbers(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.delenv("SLURM_PROCID", raising=False)
    with pytest.raises(ValueError) as error:
        select_gpu("cuda", 0, 2)
    assert_says_what_is_missing(str(error.value))


if __name__ == "__main__":
    options = parse_args("launch", sys.argv[2:])
    options.out = sys.argv[1]
    run(worker, options)
