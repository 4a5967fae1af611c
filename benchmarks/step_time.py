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
import contextlib
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import repository  # noqa: F401  first: the way to its modules
import torch
from torch import Tensor, nn

from multi_train_utils import trainer
from multi_train_utils.data_pipeline import StreamingData
from multi_train_utils.distributed_utils import cleanup, init_distributed_mode, set_single_process
from multi_train_utils.options import Options, parse_args
from multi_train_utils.safety.ending import run
from multi_train_utils.safety.rendezvous import meet
from multi_train_utils.speed.device_data import DeviceData
from multi_train_utils.speed.slow_imports import import_all
from multi_train_utils.train_eval_utils import TrainStep, keep_frozen_statistics

SKIP = 5  # steps at the start of an epoch that do not count
CEILING_STEPS = 200  # on a GPU; a CPU takes ten
Measured = Callable[[TrainStep, DeviceData | StreamingData], TrainStep]  # as trainer.train takes it


class Enough(Exception):
    """All has been measured: ends the trainer's run before its first epoch, on every rank."""


class Clock:
    """Marks in time: CUDA events, which do not stall the GPU, or the host's clock."""

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"

    def mark(self) -> Any:
        """Now, on the device: when all that was started before has been computed."""
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, first: Any, second: Any) -> float:
        """Milliseconds from one mark to another."""
        if not self.on_gpu:
            return 1000 * (second - first)
        second.synchronize()
        return first.elapsed_time(second)


class TimedStep(TrainStep):
    """The TrainStep ``step``, with marks after each step and around the saving of an epoch.

    Without ``training`` it throws the batches away.
    """

    def __init__(self, step: TrainStep, clock: Clock, training: bool = True) -> None:
        self.__dict__.update(step.__dict__)  # the same model, optimizer and scaler
        self.step, self.clock = step, clock
        self.no_loss = None if training else torch.zeros((), device=step.device)
        self.epochs: list[list[Any]] = []  # a mark after each step
        self.pauses: list[tuple[Any, Any]] = []  # last validation step, first training step
        self.validated: Any = None  # the mark after the last validation step since the last step
        network = getattr(step.model, "module", step.model)  # evaluate() leaves DDP aside
        network.register_forward_hook(self.after_forward)

    def after_forward(self, network: nn.Module, inputs: Any, output: Any) -> None:
        """Mark a validation step, which only the network hears of.

        A rank without validation images takes its epochs for one; rank 0, which reports, has some.
        """
        if not network.training:
            self.validated = self.clock.mark()

    def __call__(self, *batch: Tensor) -> Tensor:
        if self.validated is not None:
            # The stream has waited for the epoch's first batch: its step begins here.
            self.pauses.append((self.validated, self.clock.mark()))
        if self.validated is not None or not self.epochs:
            self.epochs.append([])
        self.validated = None
        loss = self.step(*batch) if self.no_loss is None else self.no_loss
        self.epochs[-1].append(self.clock.mark())
        return loss

    def close(self) -> None:
        self.step.close()


def train_measured(args: Options, measured: Measured) -> None:
    """A run of the trainer, in a temporary output folder, until its end or ``Enough``."""
    with tempfile.TemporaryDirectory(prefix="step_time_") as folder:
        args.output_dir = folder
        with contextlib.suppress(Enough):
            trainer.train(args, measured)


def replay_alone(step: TrainStep, data: DeviceData | StreamingData) -> Callable[[], Tensor]:
    """``step`` on one fixed batch, ready to be called again and again before the first epoch."""
    import_all()  # the trainer's thread has begun on it: a step beside that would be slower
    batch = data.example()
    step.model.train()
    keep_frozen_statistics(step.model)
    return lambda: step(*batch)


def measure_epochs(args: Options, training: bool) -> tuple[list[float], list[float]]:
    """(ms from step to step, ms of each gap between epochs) in the real loop.

    Without ``training`` from batch to batch, each brought to the device and thrown away; no gaps.
    """
    made: list[TimedStep] = []

    def measured(step: TrainStep, data: DeviceData | StreamingData) -> TrainStep:
        made.append(TimedStep(step, Clock(step.device), training))
        return made[0]

    train_measured(args, measured)
    (timed,) = made
    gaps = [timed.clock.between(*pause) for pause in timed.pauses] if training else []
    return timed_steps(timed.epochs, timed.clock), gaps


def measure_ceiling(args: Options) -> tuple[list[float], list[float]]:
    """The same step again and again on one batch: no input, no validation, no saving."""
    times: list[float] = []

    def measured(step: TrainStep, data: DeviceData | StreamingData) -> TrainStep:
        replay, clock, marks = replay_alone(step, data), Clock(step.device), []
        for _ in range(SKIP + (CEILING_STEPS if clock.on_gpu else 10)):
            replay()
            marks.append(clock.mark())
        times.extend(timed_steps([marks], clock))
        step.close()
        raise Enough

    train_measured(args, measured)
    return times, []


def timed_steps(epochs: list[list[Any]], clock: Clock) -> list[float]:
    """Milliseconds from step to step within each epoch, from the marks after its steps."""
    times: list[float] = []
    for marks in epochs:
        skip = min(SKIP, len(marks) // 2)  # an epoch of large batches has few steps
        times += [clock.between(*pair)
                  for pair in zip(marks[skip:], marks[skip + 1:], strict=False)]
    return times


def percentile(values: list[float], share: float) -> float:
    """The value below which ``share`` of the values lie (nearest rank)."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def describe(args: Options, what: str, times: list[float], gaps: list[float]) -> str:
    """The JSON line for ``times`` and ``gaps``, lists of milliseconds."""
    images = args.batch_size * args.world_size
    line: dict[str, Any] = {"what": what, "processes": args.world_size,
                            "batch_size": args.batch_size, "amp": args.amp, "steps": len(times)}
    line |= {f"p{share}": round(percentile(times, share / 100), 3) for share in (10, 50, 90)}
    line["images_per_second"] = round(1000 * images / statistics.fmean(times), 1)
    if gaps:
        line["save_gap_ms"] = {"median": round(statistics.median(gaps), 2),
                               "max": round(max(gaps), 2)}
    return json.dumps(line)


def join(args: Options) -> None:
    """This process's place in its job, as the doors would find it."""
    if args.script == "launch":
        init_distributed_mode(args, join=meet)
    else:
        set_single_process(args)


def main(args: Options) -> None:
    """Train in a temporary output folder and print the result."""
    join(args)
    times, gaps = measure_ceiling(args) if args.measured == "ceiling" else measure_epochs(
        args, training=args.measured == "loop")
    if args.rank == 0 and not times:
        raise ValueError("an epoch has too few steps to measure: use a smaller --batch-size")
    if args.rank == 0:
        print(describe(args, args.what or args.measured, times, gaps), flush=True)
    cleanup()


def read_options() -> Options:
    """The training scripts' options, with our own beside them."""
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
