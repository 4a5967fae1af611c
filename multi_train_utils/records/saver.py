"""Each epoch's files, written beside the next epochs from a copy."""

import os
import queue
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from utils import write_error, written_whole


def save(content: Any, path: Path) -> None:
    """``torch.save`` that leaves a whole file or none."""
    with written_whole(path) as temporary:
        torch.save(content, temporary)


def link_or_copy(source: Path, target: Path) -> None:
    """Make ``target`` the same file as ``source``: a hard link, a copy where links are not had."""
    with written_whole(target) as temporary:
        try:
            os.link(source, temporary)
        except OSError:
            shutil.copyfile(source, temporary)


def snapshot(value: Any) -> Any:
    """A copy of nested dicts and lists of tensors, each where it lies, that later steps leave be.

    Within a GPU's memory that takes a millisecond; the way to the CPU, a hundred times longer, is
    the saver's.
    """
    return each_tensor(value, copied)


def copied(tensor: Tensor) -> Tensor:
    """A copy in the same memory, or on the CPU where a GPU's is full."""
    try:
        return tensor.detach().clone()
    except torch.cuda.OutOfMemoryError:
        return tensor.detach().cpu()


def each_tensor(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same nested dicts and lists with ``change(tensor)`` in place of each tensor."""
    if isinstance(value, dict):
        return {key: each_tensor(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [each_tensor(item, change) for item in value]
    return change(value) if isinstance(value, torch.Tensor) else value


class Saver:
    """Writes each epoch's files beside the next epochs, from a copy, in a thread of its own.

    Every model-{epoch}.pth is written. Where the disk is slower than an epoch, checkpoint.pth skips
    every second one, never the last; training waits only once three epochs are yet to be written,
    whose copies lie in the GPU's memory until their turn.
    """

    def __init__(self, folder: Path, keep: int | None = None) -> None:
        self.folder, self.keep = Path(folder), keep
        self.error: Exception | None = None
        self.queue: queue.Queue[Any] = queue.Queue(maxsize=2)
        self.skipped = False  # whether the last epoch went without a checkpoint.pth
        # Of its own, so that copies to the CPU do not stand in line behind the next epoch's steps.
        self.stream = torch.cuda.Stream() if torch.cuda.is_initialized() else None
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise write_error(self.folder, error) from error
        for stale in self.folder.glob(".*.tmp"):  # of a run that was killed while it wrote
            stale.unlink()
        threading.Thread(target=self._write_all, name="saver", daemon=True).start()

    def save_epoch(self, epoch: int, checkpoint: dict[str, Any], best: bool) -> None:
        """Write model-{epoch}.pth, best.pth if ``best``, checkpoint.pth; raises earlier failures.

        ``checkpoint`` is a snapshot(); its "model" entry is the plain state dict.
        """
        self._raise_error()
        self.queue.put((epoch, checkpoint, best, self._mark()))

    def save_now(self, checkpoint: dict[str, Any]) -> None:
        """Write checkpoint.pth alone, before returning: a run stopped in the middle of an epoch."""
        self.wait()
        save(self._on_cpu(checkpoint, self._mark()), self.folder / "checkpoint.pth")

    def busy(self) -> bool:
        """True while something is yet to be written."""
        return self.queue.unfinished_tasks > 0

    def finish(self, limit: float = 4.0) -> None:
        """After a failure: give what is being written ``limit`` seconds to reach the disk."""
        end = time.monotonic() + limit
        while self.busy() and time.monotonic() < end:
            time.sleep(0.05)

    def wait(self) -> None:
        """Until all is written; raises what went wrong there."""
        self.queue.join()
        self._raise_error()

    def _raise_error(self) -> None:
        if self.error is not None:
            error, self.error = self.error, None
            raise error

    def _write_all(self) -> None:
        while True:
            item = self.queue.get()
            try:
                if self.error is None:
                    self._write(*item)
            except Exception as error:  # handed to the training thread, which ends the run
                self.error = error
            finally:
                self.queue.task_done()

    def _mark(self) -> Any:
        """Marks, on the GPU, the moment when the snapshot is complete."""
        return self.stream and torch.cuda.current_stream().record_event()

    def _on_cpu(self, checkpoint: dict[str, Any], copied: Any) -> dict[str, Any]:
        if self.stream is None:
            return checkpoint
        with torch.cuda.stream(self.stream):
            self.stream.wait_event(copied)
            return each_tensor(checkpoint, lambda tensor: tensor.cpu().contiguous())

    def _write(self, epoch: int, checkpoint: dict[str, Any], best: bool, copied: Any) -> None:
        checkpoint = self._on_cpu(checkpoint, copied)
        weights = self.folder / f"model-{epoch}.pth"
        save(checkpoint["model"], weights)
        if best:
            link_or_copy(weights, self.folder / "best.pth")
        # Not two in a row: on a disk that is always behind there would never be one.
        self.skipped = not (self.queue.empty() or self.skipped)
        if not self.skipped:
            save(checkpoint, self.folder / "checkpoint.pth")
        if self.keep is not None:
            self._remove_older(epoch)

    def _remove_older(self, epoch: int) -> None:
        assert self.keep is not None
        kept = range(epoch - self.keep + 1, epoch + 1)
        for path in self.folder.glob("model-*.pth"):
            number = path.stem.removeprefix("model-")
            if number.isdecimal() and int(number) <= epoch and int(number) not in kept:
                path.unlink()
