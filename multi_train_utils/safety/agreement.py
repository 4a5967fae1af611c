"""All ranks start from the same weights, and from the same images: shared, then checked."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from .guard import Guard


def share_initial_weights(model: nn.Module, guard: Guard) -> None:
    """Give every rank rank 0's initial weights, by a file in a private temporary folder.

    Where a rank cannot see the file, on another node, or it could not be written, the values are
    sent to all. Rank 0 removes the file as soon as all have read it.
    """
    folder = path = None
    try:
        if guard.rank == 0:
            with contextlib.suppress(OSError, RuntimeError):  # no space left there, say
                folder = tempfile.mkdtemp(prefix="initial_weights_")
                file = os.path.join(folder, "initial_weights.pt")
                torch.save(model.state_dict(), file)
                path = file
        path = guard.first(path)
        seen = path is not None and os.path.isfile(path)
        if guard.rank > 0 and seen:
            model.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
        if not all(guard.gather(seen)):
            model.load_state_dict(guard.first(model.state_dict()))
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def check_same_weights(model: nn.Module, guard: Guard) -> None:
    """Raise ``RuntimeError`` where a rank's weights differ from rank 0's in any bit."""
    prints = guard.gather(fingerprint(model.state_dict()))
    different = [rank for rank, value in enumerate(prints) if value != prints[0]]
    if different:
        raise RuntimeError(f"rank {', '.join(map(str, different))} would start from other weights "
                           "than rank 0")


def fingerprint(state: Mapping[str, Tensor]) -> list[int]:
    """A few integers that tell two state dicts apart; computed where the tensors are."""
    sums = []
    for value in state.values():
        if value.numel():
            bits = value.detach().contiguous().view(-1).view(torch.uint8).to(torch.int64)
            place = torch.arange(1, len(bits) + 1, device=bits.device) % 65521
            sums.append((bits * place).sum())
    return torch.stack(sums).cpu().tolist() if sums else []
