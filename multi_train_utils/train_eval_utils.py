"""Train one epoch and evaluate, on one process or many.

Needs torch, tqdm and distributed_utils.py: copy the two files side by side into a project of your
own and they work there, with your model and your DataLoader.
"""

import math
import sys
import threading
import time

import torch
import torch.distributed as dist
from torch import nn
from tqdm import tqdm

try:
    from .distributed_utils import get_world_size, is_main_process
except ImportError:  # copied side by side, outside a package
    from distributed_utils import get_world_size, is_main_process

BATCH_NORMS = nn.modules.batchnorm._BatchNorm


def train_one_epoch(model, optimizer, data_loader, device, epoch, *,
                    step=None, meter=None, before_step=None, after_step=None):
    """Train for one epoch; returns the mean loss over all its images and all processes.

    ``data_loader`` yields batches whose last element is the labels (B, int64). By default a batch
    is (images, labels) and the loss is the cross-entropy of ``model(images)``. What the trainer
    adds: ``step(*batch)`` trains on one batch and returns its mean loss, a detached scalar on
    ``device``; ``meter``, an EpochMeter that may hold the first part of a resumed epoch;
    ``before_step()`` and ``after_step()`` are called around each step. Without ``after_step`` a
    loss that is not finite raises ``FloatingPointError``, in the process that met it.
    """
    model.train()
    keep_frozen_statistics(model)
    step = step or plain_step(model, optimizer, device)
    meter = meter or EpochMeter(device)
    for batch in progress(meter.timed(data_loader), f"epoch {epoch}", length(data_loader)):
        if before_step is not None:
            before_step()
        meter.add(step(*batch), len(batch[-1]))
        if after_step is not None:
            after_step()
        elif (bad := meter.first_bad()) is not None:
            raise FloatingPointError(f"epoch {epoch}, step {bad[0]}: the loss is {bad[1]}")
    return meter.mean()


def plain_step(model, optimizer, device):
    """One training step as every PyTorch tutorial has it, as a function of (images, labels)."""
    criterion = nn.CrossEntropyLoss()

    def step(images, labels):
        images, labels = (t.to(device, non_blocking=True) for t in (images, labels))
        loss = criterion(model(images), labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


@torch.no_grad()
def evaluate(model, data_loader, device, *, prepare=None, confusion=None):
    """Count the correct predictions over all processes; returns an int, the same in each.

    ``data_loader`` yields (images, labels): this process's share, which may be empty. A label of
    -1 marks padding and counts as nothing. ``prepare(images, labels)`` may bring a batch to the
    device. ``confusion`` (classes x classes, int64, on ``device``; row = true class, column =
    predicted) is filled with the counts over all processes.

    What is evaluated is what rank 0 would save: its BatchNorm statistics go to all ranks first.
    DistributedDataParallel's own forward is left aside, since it exchanges buffers in each call
    and shares of different length would wait for each other for ever.
    """
    if isinstance(model, nn.parallel.DistributedDataParallel):
        model = model.module
    share_buffers(model)
    model.eval()
    counts = torch.zeros((), dtype=torch.int64, device=device)
    for images, labels in data_loader:
        if prepare is not None:
            images, labels = prepare(images, labels)
        else:
            images, labels = (t.to(device, non_blocking=True) for t in (images, labels))
        predicted = model(images).argmax(dim=1)
        counts += (predicted == labels).sum()
        if confusion is not None:
            cell = labels.clamp(min=0) * confusion.shape[1] + predicted
            confusion.view(-1).index_add_(0, cell, (labels >= 0).long())
    if get_world_size() > 1:
        dist.all_reduce(counts)
        if confusion is not None:
            dist.all_reduce(confusion)
    return int(counts)


def share_buffers(model):
    """Give every process rank 0's buffers (BatchNorm's running statistics)."""
    if get_world_size() < 2:
        return
    for dtype in sorted({b.dtype for b in model.buffers()}, key=str):
        buffers = [b for b in model.buffers() if b.dtype == dtype]
        # One message in place of a hundred small ones.
        flat = torch.cat([b.detach().reshape(-1) for b in buffers])
        dist.broadcast(flat, src=0)
        parts = flat.split([b.numel() for b in buffers])
        for buffer, part in zip(buffers, parts, strict=True):
            buffer.copy_(part.view_as(buffer))


def keep_frozen_statistics(model):
    """Leave BatchNorm layers whose weights are frozen in evaluation mode.

    In training mode a frozen layer would still move its running statistics, and the "frozen"
    network would drift away from the weights that it was given.
    """
    for layer in model.modules():
        if isinstance(layer, BATCH_NORMS) and layer.weight is not None:
            if not layer.weight.requires_grad:
                layer.eval()


class EpochMeter:
    """The losses of an epoch, kept on the device: reading one stalls a GPU until it is there.

    ``loss_sum`` and ``images`` are what an interrupted epoch had reached in this process.
    """

    READ_EVERY = 16  # steps between two copies of the losses to the host, on a GPU

    def __init__(self, device, loss_sum=0.0, images=0):
        self.device = torch.device(device)
        self.past_sum, self.past_images = loss_sum, images
        self.losses = torch.zeros(1024, device=self.device)
        self.batch_sizes = []
        self.waited = 0.0  # seconds that the loop stood still until a batch came
        self.read = 0  # steps whose losses the host has seen
        self.pending = None

    def timed(self, data_loader):
        """The same batches; adds up how long each was waited for."""
        batches = iter(data_loader)
        while True:
            start = time.perf_counter()
            batch = next(batches, None)
            self.waited += time.perf_counter() - start
            if batch is None:
                return
            yield batch

    def add(self, loss, images):
        """Note the mean loss (scalar tensor on the device) of a step over ``images`` images."""
        step = len(self.batch_sizes)
        if step == len(self.losses):
            self.losses = torch.cat([self.losses, torch.zeros_like(self.losses)])
        self.losses[step].copy_(loss)
        self.batch_sizes.append(images)

    def first_bad(self):
        """(step, value) of a loss that is not finite, else None; on a GPU some steps late."""
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

    def last_bad(self):
        """As first_bad, but waits for the device and looks at every step so far."""
        self.pending = None
        steps = len(self.batch_sizes)
        return self._scan(self.losses[self.read:steps].cpu(), steps)

    def _scan(self, values, upto):
        start, self.read = self.read, upto
        for offset, value in enumerate(values.tolist()):
            if not math.isfinite(value):
                return start + offset, value
        return None

    def totals(self):
        """(sum of the loss over this process's images, number of images); waits for the device."""
        steps = len(self.batch_sizes)
        sizes = torch.tensor(self.batch_sizes, dtype=torch.float64)
        losses = self.losses[:steps].double().cpu()
        images = self.past_images + int(sizes.sum())
        return self.past_sum + float((losses * sizes).sum()), images

    def mean(self):
        """Mean loss over the images of all processes; nan where there were none."""
        totals = torch.tensor(self.totals(), dtype=torch.float64, device=self.device)
        if get_world_size() > 1:
            dist.all_reduce(totals)
        loss_sum, images = totals.tolist()
        return loss_sum / images if images else math.nan


def length(data_loader):
    """Number of batches, None where the loader cannot tell."""
    try:
        return len(data_loader)
    except TypeError:
        return None


def progress(items, text, total):
    """The items, with a progress bar: on rank 0 alone, and only where a person looks at it."""
    if not (is_main_process() and sys.stderr.isatty()):
        return items
    # One thread of one process draws: tqdm's own lock among processes would outlive a killed one.
    tqdm.set_lock(threading.RLock())
    return tqdm(items, desc=text, total=total, mininterval=0.5, leave=False)
