"""Time of a training step in the real loop: `trainer.train` itself, with a mark after each step.

    python benchmarks/step_time.py --data-path flower_photos --amp bf16
    torchrun --standalone --nproc_per_node=2 benchmarks/step_time.py --data-path flower_photos
    python benchmarks/step_time.py --data-path flower_photos --no-input    # what the step allows
    python benchmarks/step_time.py --data-path flower_photos --data-cache off --no-step
                                                                 # what decoding allows

Every other option is one of the training scripts. Rank 0 prints one JSON line: the 10th, 50th and
90th percentile of the time from step to step in ms; images per second over all processes, from
the mean; and save_gap_ms, from the last validation step of an epoch to the first training step of
the next one, while the epoch's weights are being written.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from any folder

from multi_train_utils.failures import run  # noqa: E402

from multi_train_utils import trainer  # noqa: E402
from multi_train_utils.distributed_utils import (  # noqa: E402
    cleanup,
    init_distributed_mode,
    set_single_process,
)
from multi_train_utils.options import parse_args  # noqa: E402

SKIP = 5  # steps at the start of an epoch that do not count
CEILING_STEPS = 200  # on a GPU; a CPU takes ten


class Clock:
    """Marks in time: CUDA events, which do not stall the GPU, or the host's clock."""

    def __init__(self, device):
        self.on_gpu = device.type == "cuda"

    def mark(self):
        """Now, on the device: when all that was started before has been computed."""
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, first, second):
        """Milliseconds from one mark to another."""
        if not self.on_gpu:
            return 1000 * (second - first)
        second.synchronize()
        return first.elapsed_time(second)


class TimedRun(trainer.Run):
    """The trainer's Run, with marks after each step and around the saving of an epoch."""

    result = None  # (ms from step to step, ms of each gap between epochs) when all is done

    def all_epochs(self):
        self.clock = Clock(self.device)
        self.steps, self.validated, self.begun = [], [], []
        super().all_epochs()
        self.report()

    def one_epoch(self):
        self.steps.append([])
        super().one_epoch()

    def before_step(self):
        super().before_step()
        if not self.steps[-1]:
            # The stream has waited for the epoch's first batch: its step begins here.
            self.begun.append(self.clock.mark())

    def after_step(self):
        self.steps[-1].append(self.clock.mark())
        super().after_step()

    def validate(self):
        counts = super().validate()
        self.validated.append(self.clock.mark())
        return counts

    def report(self):
        """Turn the marks into ``TimedRun.result``."""
        between, times = self.clock.between, []
        for marks in self.steps:
            skip = min(SKIP, len(marks) // 2)  # an epoch of large batches has few steps
            times += [between(*pair) for pair in zip(marks[skip:], marks[skip + 1:], strict=False)]
        gaps = [between(*pair) for pair in zip(self.validated, self.begun[1:], strict=False)]
        TimedRun.result = times, gaps


class CeilingRun(TimedRun):
    """The same step again and again on one batch: no input, no validation, no saving."""

    def all_epochs(self):
        self.clock, batch = Clock(self.device), self.data.example()
        self.validated, self.begun, marks = [], [], []
        self.model.train()
        for _ in range(SKIP + (CEILING_STEPS if self.clock.on_gpu else 10)):
            self.replay(*batch)
            marks.append(self.clock.mark())
        self.steps = [marks]
        self.report()


class InputRun(TimedRun):
    """The epochs' batches, brought to the device and thrown away: no step."""

    def all_epochs(self):
        self.clock = Clock(self.device)
        self.validated, self.begun, self.steps = [], [], []
        for epoch in range(self.args.epochs):
            marks = []
            for _ in self.data.train_batches(epoch):
                marks.append(self.clock.mark())
            self.steps.append(marks)
        self.report()


def percentile(values, share):
    """The value below which ``share`` of the values lie (nearest rank)."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def describe(args, what, times, gaps):
    """The JSON line for ``times`` and ``gaps``, lists of milliseconds."""
    images = args.batch_size * args.world_size
    line = {"what": what, "processes": args.world_size, "batch_size": args.batch_size,
            "amp": args.amp, "steps": len(times)}
    line |= {f"p{share}": round(percentile(times, share / 100), 3) for share in (10, 50, 90)}
    line["images_per_second"] = round(1000 * images / statistics.fmean(times), 1)
    if gaps:
        line["save_gap_ms"] = {"median": round(statistics.median(gaps), 2),
                               "max": round(max(gaps), 2)}
    return json.dumps(line)


def main(args):
    """Train in a temporary output folder and print the result."""
    if args.script == "launch":
        init_distributed_mode(args)
    else:
        set_single_process(args)
    trainer.Run = {"input": InputRun, "ceiling": CeilingRun, "loop": TimedRun}[args.measured]
    with tempfile.TemporaryDirectory(prefix="step_time_") as folder:
        args.output_dir = folder
        trainer.train(args)
    times, gaps = TimedRun.result
    if args.rank == 0 and not times:
        raise ValueError("an epoch has too few steps to measure: use a smaller --batch-size")
    if args.rank == 0:
        print(describe(args, args.what or args.measured, times, gaps), flush=True)
    cleanup()


def read_options():
    """Our own options, and all others as the training script's namespace."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--no-input", dest="measured", action="store_const", const="ceiling",
                      help="replay the step on one fixed batch: the ceiling of the loop")
    kind.add_argument("--no-step", dest="measured", action="store_const", const="input",
                      help="fetch the batches without training: the ceiling of the input")
    parser.add_argument("--what", help="name of the measurement in the JSON line")
    parser.set_defaults(measured="loop")
    own, others = parser.parse_known_args()
    # Before the user's own words: a later option overrides an earlier one.
    args = parse_args("launch" if "RANK" in os.environ else "single", ["--epochs", "3", *others])
    args.measured, args.what = own.measured, own.what
    return args


if __name__ == "__main__":
    run(main, read_options())
