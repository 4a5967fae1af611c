"""Weights and checkpoints: read with suspicion, written whole or not at all."""

import argparse
import contextlib
import os
import queue
import shutil
import tempfile
import threading
import time
import zipfile
from pathlib import Path

import torch

from .failures import unfinished_files


def read_torch_file(path):
    """What ``torch.save`` wrote to ``path``, on the CPU; nothing inside the file is executed.

    Raises ``FileNotFoundError`` and ``ValueError``, both naming the file.
    """
    if not os.path.isfile(path):
        what = "a folder, not a file" if os.path.isdir(path) else "no such file"
        raise FileNotFoundError(f"{path}: {what}")
    try:
        check_unpacked_size(path)
        # Many training scripts put their options beside the weights: plain data, no code.
        with torch.serialization.safe_globals([argparse.Namespace]):
            return torch.load(path, map_location="cpu", weights_only=True)
    except PermissionError:
        raise
    except MemoryError as error:
        raise ValueError(f"{path}: the file asks for more memory than there is") from error
    except Exception as error:  # damaged files raise a dozen different types
        reason = str(error).strip().splitlines() or [type(error).__name__]
        if "Unsupported" in str(error) or "GLOBAL" in str(error):
            text = ("holds Python objects other than tensors and plain data, which could run code "
                    "when loaded. Save its state dict alone: torch.save(model.state_dict(), path)")
        else:
            text = "is damaged or no file of torch.save"
        raise ValueError(f"{path}: {text} ({type(error).__name__}: {reason[0][:200]})") from error


def check_unpacked_size(path):
    """Raise ``ValueError`` where a zip file unpacks to more than it holds.

    ``torch.save`` packs nothing, but torch unpacks what is packed, before it compares any size: a
    few KiB could ask for all of the memory.
    """
    with open(path, "rb") as file:
        if file.read(4) != b"PK\3\4":  # torch takes it for a file of its older format
            return
        with zipfile.ZipFile(file) as members:
            size = sum(member.file_size for member in members.infolist())
    if size > os.path.getsize(path):
        raise ValueError(f"it would unpack to {size} bytes, more than it holds")


def read_weights(path):
    """The state dict in a weight file: {name: tensor}.

    Plain, or under "state_dict" or "model", with or without "module." before the names (as saved
    from a wrapped multi-GPU model). Raises ``ValueError`` naming the file, also for tensors that
    cannot be weights: without values, sparse, quantized, complex.
    """
    content = read_torch_file(path)
    for key in ("state_dict", "model"):
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
            break
    if not isinstance(content, dict):
        raise ValueError(f"{path}: holds a {type(content).__name__}, not a state dict")
    found = {name.removeprefix("module."): value for name, value in content.items()
             if isinstance(name, str) and isinstance(value, torch.Tensor)}
    for name, value in found.items():
        if not is_dense(value) or value.is_complex():
            raise ValueError(f"{path}: {name[:200]} is no ordinary tensor of real numbers")
    return found


def is_dense(value):
    """True for a tensor whose values all lie in memory: not sparse, quantized, nested or "meta"."""
    return (isinstance(value, torch.Tensor) and value.layout == torch.strided
            and value.device.type == "cpu" and not value.is_quantized and not value.is_nested)


def load_weights(model, path):
    """Load what fits from a weight file into ``model``; returns lines that say what did.

    Entries of another shape stay as they are in the model and are listed with both shapes: a
    head of 1000 classes on 5 is normal. Raises ``ValueError`` where nothing fits.
    """
    given, own = read_weights(path), model.state_dict()
    fits = {name: value for name, value in given.items()
            if name in own and value.shape == own[name].shape}
    others = [f"    not loaded: {name} is {tuple(given[name].shape)} in the file, "
              f"{tuple(own[name].shape)} in the model"
              for name in own if name in given and name not in fits]
    # A few names in common (conv1, fc) do not make it a file of this network.
    if len(fits) < len(own) / 2:
        raise ValueError(f"{path}: only {len(fits)} of the model's {len(own)} tensors are in it "
                         f"with the right shape ({len(given)} in the file): these are the weights "
                         "of another network. Choose its --model, or another file.")
    with torch.no_grad():
        for name, value in fits.items():
            try:
                own[name].copy_(value)
            except RuntimeError as error:  # types that torch can store and not convert
                raise ValueError(f"{path}: {name} holds {value.dtype}, which cannot be converted "
                                 f"to {own[name].dtype}") from error
    missing = [name for name in own if name not in given]
    if missing:
        others.append(f"    not in the file: {', '.join(missing[:5])}"
                      + (f" and {len(missing) - 5} more" if len(missing) > 5 else ""))
    return [f"{path}: {len(fits)} of {len(own)} tensors loaded", *others]


def share_initial_weights(model, device, control):
    """Give every rank rank 0's initial weights, by a file in a private temporary folder.

    Where a rank cannot see the file, on another node, or it could not be written, the values are
    sent to all. Rank 0 removes the file as soon as all have read it.
    """
    folder = path = None
    try:
        if control.rank == 0:
            with contextlib.suppress(OSError, RuntimeError):  # no space left there, say
                folder = tempfile.mkdtemp(prefix="initial_weights_")
                file = os.path.join(folder, "initial_weights.pt")
                torch.save(model.state_dict(), file)
                path = file
        path = control.first(path)
        seen = path is not None and os.path.isfile(path)
        if control.rank > 0 and seen:
            model.load_state_dict(torch.load(path, map_location=device, weights_only=True))
        if not all(control.gather(seen)):
            model.load_state_dict(control.first(model.state_dict()))
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def check_same_weights(model, control):
    """Raise ``RuntimeError`` where a rank's weights differ from rank 0's in any bit."""
    prints = control.gather(fingerprint(model.state_dict()))
    different = [rank for rank, value in enumerate(prints) if value != prints[0]]
    if different:
        raise RuntimeError(f"rank {', '.join(map(str, different))} would start from other weights "
                           "than rank 0")


def fingerprint(state):
    """A few integers that tell two state dicts apart; computed where the tensors are."""
    sums = []
    for value in state.values():
        if value.numel():
            bits = value.detach().contiguous().view(-1).view(torch.uint8).to(torch.int64)
            place = torch.arange(1, len(bits) + 1, device=bits.device) % 65521
            sums.append((bits * place).sum())
    return torch.stack(sums).cpu().tolist() if sums else []


@contextlib.contextmanager
def written_whole(path):
    """A temporary path beside ``path``; renamed to it at the end, removed after any failure.

    ``OSError`` (full disk, read-only folder, file-size limit) names the path; the older file stays
    as it was.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    unfinished_files.add(temporary)
    try:
        yield temporary
        with open(temporary, "r+b") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:
        # torch reports a failed write as RuntimeError, without the system's reason.
        raise write_error(path, error) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
        unfinished_files.discard(temporary)


def write_error(path, error):
    """A failed write as an ``OSError`` that says which file, why, and what to do."""
    reason = getattr(error, "strerror", None) or str(error).strip().splitlines()[0]
    with contextlib.suppress(OSError):
        if shutil.disk_usage(path.parent).free < 2**20:
            reason = "no space left on the device"
    return OSError(f"cannot write {path}: {reason}. The older file, if any, is as it was; free "
                   "space there or choose another --output-dir")


def save(content, path):
    """``torch.save`` that leaves a whole file or none."""
    with written_whole(path) as temporary:
        torch.save(content, temporary)


def link_or_copy(source, target):
    """Make ``target`` the same file as ``source``: a hard link, a copy where links are not had."""
    with written_whole(target) as temporary:
        try:
            os.link(source, temporary)
        except OSError:
            shutil.copyfile(source, temporary)


def snapshot(value):
    """A copy of nested dicts and lists of tensors, each where it lies, that later steps leave be.

    Within a GPU's memory that takes a millisecond; the way to the CPU, a hundred times longer, is
    the saver's.
    """
    return each_tensor(value, copied)


def copied(tensor):
    """A copy in the same memory, or on the CPU where a GPU's is full."""
    try:
        return tensor.detach().clone()
    except torch.cuda.OutOfMemoryError:
        return tensor.detach().cpu()


def each_tensor(value, change):
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

    def __init__(self, folder, keep=None):
        self.folder, self.keep, self.error = Path(folder), keep, None
        self.queue = queue.Queue(maxsize=2)
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

    def save_epoch(self, epoch, checkpoint, best):
        """Write model-{epoch}.pth, best.pth if ``best``, checkpoint.pth; raises earlier failures.

        ``checkpoint`` is a snapshot(); its "model" entry is the plain state dict.
        """
        self._raise_error()
        self.queue.put((epoch, checkpoint, best, self._mark()))

    def save_now(self, checkpoint):
        """Write checkpoint.pth alone, before returning: a run stopped in the middle of an epoch."""
        self.wait()
        save(self._on_cpu(checkpoint, self._mark()), self.folder / "checkpoint.pth")

    def busy(self):
        """True while something is yet to be written."""
        return self.queue.unfinished_tasks > 0

    def finish(self, limit=4.0):
        """After a failure: give what is being written ``limit`` seconds to reach the disk."""
        end = time.monotonic() + limit
        while self.busy() and time.monotonic() < end:
            time.sleep(0.05)

    def wait(self):
        """Until all is written; raises what went wrong there."""
        self.queue.join()
        self._raise_error()

    def _raise_error(self):
        if self.error is not None:
            error, self.error = self.error, None
            raise error

    def _write_all(self):
        while True:
            item = self.queue.get()
            try:
                if self.error is None:
                    self._write(*item)
            except Exception as error:  # handed to the training thread, which ends the run
                self.error = error
            finally:
                self.queue.task_done()

    def _mark(self):
        """Marks, on the GPU, the moment when the snapshot is complete."""
        return self.stream and torch.cuda.current_stream().record_event()

    def _on_cpu(self, checkpoint, copied):
        if self.stream is None:
            return checkpoint
        with torch.cuda.stream(self.stream):
            self.stream.wait_event(copied)
            return each_tensor(checkpoint, lambda tensor: tensor.cpu().contiguous())

    def _write(self, epoch, checkpoint, best, copied):
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

    def _remove_older(self, epoch):
        kept = range(epoch - self.keep + 1, epoch + 1)
        for path in self.folder.glob("model-*.pth"):
            number = path.stem.removeprefix("model-")
            if number.isdecimal() and int(number) <= epoch and int(number) not in kept:
                path.unlink()
