"""The next batch is made while this one is computed on."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ..data_pipeline import Batches
from ..safety.guard import Guard


class BatchesAhead(Batches):
    """Batches for a GPU: each is made on a stream of its own, beside the step before it."""

    def __init__(self, source: Any, make: Callable[[Any], tuple[Tensor, Tensor]],
                 device: torch.device, guard: Guard) -> None:
        super().__init__(source, make, device, guard)
        self.stream = torch.cuda.Stream(device)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        items = self.items()
        self.stream.wait_stream(torch.cuda.current_stream())  # what the batches are made from
        ready = self._started(next(items, None))
        while ready is not None:
            torch.cuda.current_stream().wait_stream(self.stream)
            for tensor in ready:
                tensor.record_stream(torch.cuda.current_stream())
            yield ready
            # Once this one's step has been launched, start on the next one beside it.
            ready = self._started(next(items, None))

    def _started(self, item: Any) -> tuple[Tensor, Tensor] | None:
        if item is None:
            return None
        with torch.cuda.stream(self.stream):
            return self.make(item)


def kind_of_batches(device: torch.device) -> type[Batches]:
    """One batch ahead where there is a GPU to keep busy."""
    return BatchesAhead if device.type == "cuda" else Batches
