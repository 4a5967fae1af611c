"""Where a training step's time goes: the step of `trainer.train`, replayed under torch's profiler.

    python benchmarks/profile_step.py --data-path flower_photos
    torchrun --standalone --nproc_per_node=8 benchmarks/profile_step.py --data-path flower_photos

Options are those of the training scripts. Rank 0 prints a table of milliseconds per step, mean of
50 steps on one fixed batch: computation by kind; collectives by purpose, with what of them lies
beside computation and what does not; and the time in which the GPU did nothing. A collective's
time holds the wait for the slowest rank.
"""

import os
import re
import sys
from collections.abc import Sequence

import repository  # noqa: F401  first: the way to its modules
import torch
from step_time import Enough, join, replay_alone, train_measured

from multi_train_utils.data_pipeline import StreamingData
from multi_train_utils.distributed_utils import cleanup
from multi_train_utils.options import Options, parse_args
from multi_train_utils.safety.ending import run
from multi_train_utils.speed.device_data import DeviceData
from multi_train_utils.train_eval_utils import TrainStep

WARM_UP, STEPS = 20, 50
# The first pattern that a kernel's name holds says what it does.
COMPUTING = (("BatchNorm", "batch_norm|batchnorm|bn_fw|bn_bw"),
             ("max-pool", "max_?pool"),
             ("convolutions, matrix products",
              "conv|gemm|xmma|cutlass|cudnn|dgrad|wgrad|nchw|nhwc"),
             ("SGD", "multi_tensor|sgd"),
             ("everything else", ""))
Kernel = tuple[str, float, float]  # name, start and end in microseconds


def profiled_kernels(args: Options) -> list[Kernel]:
    """The kernels of ``STEPS`` replays of the trainer's step on one batch, in order of start."""
    kernels: list[Kernel] = []

    def measured(step: TrainStep, data: DeviceData | StreamingData) -> TrainStep:
        replay = replay_alone(step, data)
        for _ in range(WARM_UP):
            replay()
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA],
                                    acc_events=True) as profile:
            for _ in range(STEPS):
                replay()
            torch.cuda.synchronize()
        kernels.extend((event.name, event.time_range.start, event.time_range.end)
                       for event in profile.events()
                       if event.device_type == torch.autograd.DeviceType.CUDA)
        step.close()
        raise Enough

    train_measured(args, measured)
    return sorted(kernels, key=lambda one: one[1])


def covered(spans: Sequence[tuple[float, float]]) -> float:
    """Length of the union of the (start, end) spans, which come in order of their starts."""
    total, reached = 0.0, -float("inf")
    for start, end in spans:
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def collectives(kernels: list[Kernel], steps: int) -> dict[str, float]:
    """{purpose: microseconds} of NCCL's kernels.

    SyncBatchNorm gathers once and reduces once in each layer; what is reduced beyond that are the
    buckets of gradients, the longest of the reductions.
    """
    gathers = [end - start for name, start, end in kernels if "AllGather" in name]
    reductions = sorted(end - start for name, start, end in kernels if "AllReduce" in name)
    layers = min(len(gathers), len(reductions))
    found = {"SyncBatchNorm: gathering statistics": sum(gathers),
             "SyncBatchNorm: reducing their gradients": sum(reductions[:layers]),
             f"gradients ({(len(reductions) - layers) / steps:g} all-reduces)":
                 sum(reductions[layers:])}
    return {purpose: time for purpose, time in found.items() if time}


def kinds(kernels: list[Kernel]) -> dict[str, float]:
    """{kind: microseconds} of the kernels that compute."""
    found = dict.fromkeys((kind for kind, _ in COMPUTING), 0.0)
    for name, start, end in kernels:
        kind = next(kind for kind, words in COMPUTING if re.search(words, name, re.IGNORECASE))
        found[kind] += end - start
    return found


def breakdown(kernels: list[Kernel], steps: int) -> list[tuple[str, float]]:
    """[(what, milliseconds per step)] of the kernels of ``steps`` steps, in order of start."""
    sent = [kernel for kernel in kernels if "nccl" in kernel[0].lower()]
    computed = [kernel for kernel in kernels if "nccl" not in kernel[0].lower()]
    whole = max(end for _, _, end in kernels) - kernels[0][1]
    busy, computing = (covered([span[1:] for span in part]) for part in (kernels, computed))
    rows = [("step", whole), ("computing", computing),
            *((f"    {kind}", time) for kind, time in kinds(computed).items()),
            ("collectives, beside computation or not", covered([span[1:] for span in sent])),
            *((f"    {purpose}", time) for purpose, time in collectives(sent, steps).items()),
            ("nothing but collectives", busy - computing), ("idle", whole - busy)]
    return [(what, time / 1000 / steps) for what, time in rows]


def main(args: Options) -> None:
    """Train in a temporary output folder and print the table."""
    join(args)
    if args.device == "cpu":
        raise ValueError("the profile is one of a GPU: --device cpu has none")
    kernels = profiled_kernels(args)
    if args.rank == 0:
        print("| what | ms per step |\n| --- | ---: |")
        for what, time in breakdown(kernels, STEPS):
            print(f"| {what.replace('    ', '&emsp;')} | {time:.2f} |", flush=True)
    cleanup()


if __name__ == "__main__":
    run(main, parse_args("launch" if "RANK" in os.environ else "single", sys.argv[1:]))
