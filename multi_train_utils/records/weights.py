"""Weight files and checkpoints are read with suspicion: nothing in them is run or trusted."""

import argparse
import os
import zipfile
from typing import Any

import torch
from torch import Tensor, nn

from ..safety.torch_errors import holds_objects


def read_torch_file(path: str | os.PathLike) -> Any:
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
        if holds_objects(error):
            text = ("holds Python objects other than tensors and plain data, which could run code "
                    "when loaded. Save its state dict alone: torch.save(model.state_dict(), path)")
        else:
            text = "is damaged or no file of torch.save"
        raise ValueError(f"{path}: {text} ({type(error).__name__}: {reason[0][:200]})") from error


def check_unpacked_size(path: str | os.PathLike) -> None:
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


def read_weights(path: str | os.PathLike) -> dict[str, Tensor]:
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


def is_dense(value: Any) -> bool:
    """True for a tensor whose values all lie in memory: not sparse, quantized, nested or "meta"."""
    return (isinstance(value, torch.Tensor) and value.layout == torch.strided
            and value.device.type == "cpu" and not value.is_quantized and not value.is_nested)


def load_weights(model: nn.Module, path: str | os.PathLike) -> list[str]:
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
