"""What a run leaves behind, epoch by epoch: lines, records, weights; and where it may go on."""

import os
import signal
import time
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import torch
from torch import Tensor

from utils import write_class_indices

from ..data_pipeline import ImageList
from ..distributed_utils import say
from ..options import Options
from ..safety.ending import Interrupted
from ..safety.guard import Guard
from ..train_eval_utils import EpochMeter, Place, TrainStep
from . import checkpoint
from .folder import claim
from .run_log import RunLog
from .saver import Saver, snapshot


class Records:
    """Prints, logs and saves each epoch, on rank 0; holds the output folder while it is open.

    Where the ranks have agreed on a stop (Interrupted with a place) it saves on the way out.
    After any other failure the saver gets a few seconds for the last whole epoch, no more.
    """

    def __init__(self, args: Options, guard: Guard) -> None:
        self.args, self.guard = args, guard
        self.weights = Path(args.output_dir) / "weights"
        self.best = -1.0
        self.run_name: str | None = None
        self.last_confusion: Tensor | None = None
        self.lock: IO[str] | None = None
        self.log: RunLog | None = None  # these two on rank 0
        self.saver: Saver | None = None

    def __enter__(self) -> "Records":
        if self.args.rank == 0:
            self.lock = claim(self.args)
        self.guard.barrier()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        if isinstance(error, Interrupted) and error.place is not None:
            self._save_stop(error.signum, error.place)
        elif error is not None and self.saver is not None:
            self.saver.finish()  # the last whole epoch is not lost with this one
        if self.lock is not None:
            self.lock.close()

    # ---- where a run begins ----

    def read(self, classes: list[str], train_images: ImageList) -> dict[str, Any] | None:
        """The checkpoint that ``--resume`` asks for, checked against this run; else None.

        Raises ``FileNotFoundError``, and ``ValueError`` with what differs.
        """
        self.classes, self.train_list = classes, train_images.fingerprint()
        return checkpoint.read(self.args, self.guard, classes, train_images)

    def resume(self, step: TrainStep, saved: dict[str, Any] | None) -> Place:
        """Where training begins; with a checkpoint, ``step`` and the generators as they were."""
        place = Place()
        if saved is not None:
            place = checkpoint.restore(step, saved, self.args.rank)
            self.run_name = saved["run"]
            if (self.weights / "best.pth").exists():
                self.best = saved["best_accuracy"]
        self.step = step
        if place.epoch >= self.args.epochs:
            say(f"Nothing left to do: {place.epoch} of {self.args.epochs} epochs are done")
            return place
        names = self.guard.gather(torch.cuda.get_device_name(step.device)
                                  if step.device.type == "cuda" else "cpu")
        if self.args.rank == 0:
            self._open(place, names)
        return place

    def _open(self, place: Place, device_names: list[str]) -> None:
        """The run's folder and the saver; the class names only now, once all is checked."""
        args = self.args
        write_class_indices(self.classes, Path(args.output_dir) / "class_indices.json")
        self.log = RunLog(args.output_dir, self.run_name, place.epoch)
        self.run_name = self.log.name
        self.log.describe(arguments=checkpoint.plain(args), world_size=args.world_size,
                          device_names=device_names, classes=self.classes)
        say("TensorBoard: tensorboard --logdir="
            f"{os.path.join('' if args.output_dir == '.' else args.output_dir, 'runs')}, "
            "then open http://localhost:6006/")
        self.saver = Saver(self.weights, args.keep)

    # ---- what an epoch leaves ----

    def epoch(self, meter: EpochMeter, loss: float, correct: int, confusion: Tensor) -> Place:
        """Print the epoch's line, log and save it; returns where the next one begins.

        ``loss``, ``correct`` and ``confusion`` (classes x classes, int64) are those of all ranks.
        """
        epoch, total = meter.begin.epoch, int(confusion.sum())
        accuracy, self.last_confusion = correct / total, confusion
        seconds = time.perf_counter() - meter.started
        figures = {
            "epoch": epoch, "loss": loss, "accuracy": accuracy, "correct": correct, "total": total,
            "learning_rate": float(self.step.optimizer.param_groups[0]["lr"]),
            "seconds": seconds, "images_per_second": meter.images_per_second(),
            "data_wait": meter.waited / meter.seconds}
        say(f"[epoch {epoch}] accuracy: {accuracy:.3f} ({correct}/{total}), loss {loss:.3f}, "
            f"{meter.images_per_second():.0f} images/s, {seconds:.1f} s")
        if self.log is not None:
            self.log.add_epoch(figures)
        best, self.best = accuracy > self.best, max(accuracy, self.best)
        place = Place(epoch + 1)
        state = self._checkpoint(place)
        if self.saver is not None:
            self.saver.save_epoch(epoch, state, best)
        return place

    def _checkpoint(self, place: Place) -> dict[str, Any]:
        """A copy of all that a resumed run needs; random states come from all ranks."""
        states = self.guard.gather(checkpoint.random_state(self.step.device))
        if self.args.rank > 0:
            return {}
        return snapshot(checkpoint.contents(
            self.step, place, self.best, states, self.args, self.classes, self.run_name,
            self.train_list))

    def _save_stop(self, signum: int, place: Place) -> None:
        """Save where the run stands in the epoch, on all ranks, and say how to go on."""
        sums = self.guard.gather((place.loss_sum, place.loss_images))
        place = place._replace(loss_sum=sum(loss for loss, _ in sums),
                               loss_images=sum(images for _, images in sums))
        state = self._checkpoint(place)
        if self.saver is not None and self.log is not None:
            self.saver.save_now(state)
            self.log.close()
            say(f"Stopped by {signal.Signals(signum).name} in epoch {place.epoch} after "
                f"{place.images} images; all is saved. Go on with:\n"
                f"    {checkpoint.command(self.args)}")
        self.guard.barrier()  # the others wait for the file: leaving would end rank 0 too

    def finish(self) -> None:
        """Wait until all is written; per-class accuracy, and where everything lies."""
        while self.guard.largest(int(self.saver is not None and self.saver.busy()))[0]:
            time.sleep(0.1)  # nobody leaves, and nobody loses patience, while rank 0 still saves
        if self.saver is not None:
            self.saver.wait()
        self.guard.barrier()
        if self.log is None or self.last_confusion is None:
            return
        matrix = self.last_confusion.tolist()
        for number, (name, row) in enumerate(zip(self.classes, matrix, strict=True)):
            if sum(row):
                say(f"    {name}: {row[number] / sum(row):.3f} ({row[number]}/{sum(row)})")
        self.log.add_confusion(matrix, self.classes, self.args.epochs - 1)
        self.log.close()
        say(f"Best accuracy: {self.best:.3f}, weights in {self.weights / 'best.pth'}")
