"""Train one epoch and evaluate, on one process or many; the training step.

Needs torch, tqdm and distributed_utils.py: copy the two files side by side into a project of your
own and they work there, with your model and your DataLoader.
"""

import math
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from tqdm import tqdm

try:
    from .distributed_utils import get_world_size, is_main_process, reduce_value
except ImportError:  # copied side by side, outside a package
    from distributed_utils import (  # type: ignore[no-redef]
        get_world_size,
        is_main_process,
        reduce_value,
    )

BATCH_NORMS = nn.modules.batchnorm._BatchNorm
AMP_TYPES = {"off": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def train_one_epoch(model: nn.Module, optimizer: torch.optim.Optimizer, data_loader: Iterable,
                    device: torch.device, epoch: int, *, step: Callable[..., Tensor] | None = None,
                    rate: Callable[[int], float] | None = None, guard: "LossGuard | None" = None,
                    meter: "EpochMeter | None" = None) -> float:
    """Train for one epoch; returns the mean loss over all its images and all processes.

    ``data_loader`` yields batches (images, labels): labels (B, int64), images whatever the model
    takes. The loss is the cross-entropy of ``model(images)``. What the trainer adds: ``step``, a
    TrainStep of other make; ``rate(images)``, the learning rate of the step that brings the epoch
    to so many images over all processes; ``guard``, which looks after each step whether all is
    well; ``meter``, an EpochMeter that may hold the first part of a resumed epoch. Raises
    ``FloatingPointError`` for a loss that is not finite.
    """
    model.train()
    keep_frozen_statistics(model)
    step = step or TrainStep(model, optimizer, device)
    guard = guard or LossGuard()
    meter = meter or EpochMeter(device, Place(epoch))
    for batch in progress(meter.timed(data_loader), f"epoch {epoch}", length(data_loader)):
        if rate is not None:
            set_learning_rate(optimizer, rate(meter.place(more=len(batch[-1])).images))
        meter.add(step(*batch), len(batch[-1]))
        guard.after_step(meter)
    guard.after_training(meter)
    return meter.mean()


class TrainStep:
    """``step(images, labels)`` trains on one batch and returns its mean loss.

    The loss is a detached scalar on ``device``. ``prepare(images)`` gives the network's input
    (normalised, say). ``amp`` is "off", "bf16" or "fp16": fp16 scales the loss so that small
    gradients survive (Micikevicius et al. 2017, arXiv:1710.03740), and a step whose gradients
    overflow is left out and the scale halved, without the host hearing of it. With
    DistributedDataParallel ``backward`` leaves the mean gradient over the processes.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device, *,
                 prepare: Callable[[Tensor], Tensor] | None = None, amp: str = "off",
                 label_smoothing: float = 0.0) -> None:
        self.model, self.optimizer, self.device = model, optimizer, torch.device(device)
        self.prepare, self.amp_type = prepare, AMP_TYPES[amp]
        self.criterion = nn.CrossEntropyLoss(label_smoothing=label_smoothing)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=amp == "fp16")

    def __call__(self, images: Tensor, labels: Tensor) -> Tensor:
        images, labels = (t.to(self.device, non_blocking=True) for t in (images, labels))
        if self.prepare is not None:
            images = self.prepare(images)
        # Cached casts would outlive the step in a captured graph.
        with torch.autocast(self.device.type, self.amp_type, enabled=self.amp_type is not None,
                            cache_enabled=False):
            loss = self.criterion(self.model(images), labels)
        self.optimizer.zero_grad(set_to_none=True)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.detach()

    def close(self) -> None:
        """Nothing to let go of; a captured step has."""


@torch.no_grad()
def evaluate(model: nn.Module, data_loader: Iterable, device: torch.device, *,
             prepare: Callable[[Tensor], Tensor] | None = None,
             confusion: Tensor | None = None) -> int:
    """Count the correct predictions over all processes; the same in each.

    ``data_loader`` yields (images, labels): this process's share, which may be empty. A label of
    -1 marks padding and counts as nothing. ``prepare(images)`` gives the network's input.
    ``confusion`` (classes x classes, int64, on ``device``; row = true class, column = predicted)
    is filled with the counts over all processes.

    What is evaluated is what rank 0 would save: its BatchNorm statistics go to all ranks first.
    DistributedDataParallel's own forward is left aside, since it exchanges buffers in each call
    and shares of different length would wait for each other for ever.
    """
    if isinstance(model, nn.parallel.DistributedDataParallel):
        model = model.module
    share_buffers(model)
    model.eval()
    correct = torch.zeros((), dtype=torch.int64, device=device)
    for images, labels in data_loader:
        images, labels = (t.to(device, non_blocking=True) for t in (images, labels))
        if prepare is not None:
            images = prepare(images)
        predicted = model(images).argmax(dim=1)
        correct += (predicted == labels).sum()
        if confusion is not None:
            cell = labels.clamp(min=0) * confusion.shape[1] + predicted
            confusion.view(-1).index_add_(0, cell, (labels >= 0).long())
    if confusion is not None:
        confusion.copy_(reduce_value(confusion, average=False))
    return int(reduce_value(correct, average=False))


def share_buffers(model: nn.Module) -> None:
    """Give every process rank 0's buffers (BatchNorm's running statistics)."""
    if get_world_size() < 2:
        return
    for dtype in sorted({b.dtype for b in model.buffers()}, key=str):
        buffers = [b for b in model.buffers() if b.dtype == dtype]
        # One message in place of a hundred small ones.
        flat = torch.cat([b.detach().reshape(-1) for b in buffers])
        torch.distributed.broadcast(flat, src=0)
        parts = flat.split([b.numel() for b in buffers])
        for buffer, part in zip(buffers, parts, strict=True):
            buffer.copy_(part.view_as(buffer))


def keep_frozen_statistics(model: nn.Module) -> None:
    """Leave BatchNorm layers whose weights are frozen in evaluation mode.

    In training mode a frozen layer would still move its running statistics, and the "frozen"
    network would drift away from the weights that it was given.
    """
    for layer in model.modules():
        if isinstance(layer, BATCH_NORMS) and layer.weight is not None:
            if not layer.weight.requires_grad:
                layer.eval()


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Give all parameter groups the learning rate ``rate``.

    Where it is a tensor it is filled in place, so that a captured step sees the change.
    """
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


class Place(NamedTuple):
    """Where a run stands: the epoch, its images done over all processes, and their losses' sum."""

    epoch: int = 0
    images: int = 0
    loss_sum: float = 0.0
    loss_images: int = 0  # of how many images ``loss_sum`` is


class LossGuard:
    """Asked after each step and after the last: raises FloatingPointError for a loss that is not
    finite, in the process that met it."""

    def after_step(self, meter: "EpochMeter") -> None:
        self._check(meter.first_bad(), meter)

    def after_training(self, meter: "EpochMeter") -> None:
        self._check(meter.last_bad(), meter)

    def _check(self, bad: tuple[int, float] | None, meter: "EpochMeter") -> None:
        if bad is not None:
            raise FloatingPointError(f"epoch {meter.begin.epoch}, step {bad[0]}: the loss is "
                                     f"{bad[1]}")


class EpochMeter:
    """The losses of an epoch, kept on the device: reading one stalls a GPU until it is there.

    ``begin`` is where the epoch begins, or goes on in a resumed run.
    """

    READ_EVERY = 16  # steps between two copies of the losses to the host, on a GPU

    def __init__(self, device: torch.device, begin: Place | None = None) -> None:
        self.device, self.begin = torch.device(device), begin or Place()
        self.losses = torch.zeros(1024, device=self.device)
        self.batch_sizes: list[int] = []
        self.images = 0  # of this process, in this run
        self.started, self.seconds = time.perf_counter(), 0.0  # of training, once mean() is known
        self.waited = 0.0  # seconds that the loop stood still until a batch came
        self.read = 0  # steps whose losses the host has seen
        self.pending: Any = None

    def timed(self, data_loader: Iterable) -> Iterator:
        """The same batches; adds up how long each was waited for."""
        batches = iter(data_loader)
        while True:
            start = time.perf_counter()
            batch = next(batches, None)
            self.waited += time.perf_counter() - start
            if batch is None:
                return
            yield batch

    def add(self, loss: Tensor, images: int) -> None:
        """Note the mean loss (scalar tensor on the device) of a step over ``images`` images."""
        step = len(self.batch_sizes)
        if step == len(self.losses):
            self.losses = torch.cat([self.losses, torch.zeros_like(self.losses)])
        self.losses[step].copy_(loss)
        self.batch_sizes.append(images)
        self.images += images

    def first_bad(self) -> tuple[int, float] | None:
        """(step of the epoch, value) of a loss that is not finite; on a GPU some steps late."""
        steps = len(self.batch_sizes)
        if self.device.type == "cpu":
            return self._scan(self.losses[self.read:steps], steps)
        if self.pending is not None:
            values, upto, copied = self.pending
            if not copied.query():
                return None
            self.pending = None
            return self._scan(values, upto)
        if steps - self.read >= self.READ_EVERY:
            values = torch.empty(steps - self.read, pin_memory=True)
            values.copy_(self.losses[self.read:steps], non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()
            self.pending = values, steps, copied
        return None

    def last_bad(self) -> tuple[int, float] | None:
        """As first_bad, but waits for the device and looks at every step so far."""
        self.pending = None
        steps = len(self.batch_sizes)
        return self._scan(self.losses[self.read:steps].cpu(), steps)

    def _scan(self, values: Tensor, upto: int) -> tuple[int, float] | None:
        start, self.read = self.read, upto
        for offset, value in enumerate(values.tolist()):
            if not math.isfinite(value):
                before = self.begin.images // (self.batch_sizes[0] * get_world_size())
                return before + start + offset, value
        return None

    def place(self, more: int = 0) -> Place:
        """Where the epoch stands, or will once each process has done ``more`` images.

        Its losses are still the ones of ``begin``: for those of this process see totals().
        """
        done = (self.images + more) * get_world_size()
        return self.begin._replace(images=self.begin.images + done)

    def totals(self) -> tuple[float, int]:
        """(sum of the loss over this process's images, number of images); waits for the device.

        What came before ``begin`` was done by all processes; the main one counts it.
        """
        past = (self.begin.loss_sum, self.begin.loss_images) if is_main_process() else (0.0, 0)
        sizes = torch.tensor(self.batch_sizes, dtype=torch.float64)
        losses = self.losses[:len(sizes)].double().cpu()
        return past[0] + float((losses * sizes).sum()), past[1] + self.images

    def mean(self) -> float:
        """Mean loss over the images of all processes; nan where there were none."""
        totals = torch.tensor(self.totals(), dtype=torch.float64, device=self.device)
        loss_sum, images = reduce_value(totals, average=False).tolist()
        self.seconds = time.perf_counter() - self.started
        return loss_sum / images if images else math.nan

    def images_per_second(self) -> float:
        """Images trained on per second, over all processes."""
        return self.images * get_world_size() / self.seconds


def length(data_loader: Iterable) -> int | None:
    """Number of batches, None where the loader cannot tell."""
    try:
        return len(data_loader)  # type: ignore[arg-type]
    except TypeError:
        return None


def progress(items: Iterable, text: str, total: int | None) -> Iterable:
    """The items, with a progress bar: on rank 0 alone, and only where a person looks at it."""
    if not (is_main_process() and sys.stderr.isatty()):
        return items
    # One thread of one process draws: tqdm's own lock among processes would outlive a killed one.
    tqdm.set_lock(threading.RLock())
    return tqdm(items, desc=text, total=total, mininterval=0.5, leave=False)
