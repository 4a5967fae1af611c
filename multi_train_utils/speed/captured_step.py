"""A training step as one CUDA graph: launched once, not kernel by kernel.

At a batch of 16 a step's kernels run for less time than the host needs to launch them, and with
SyncBatchNorm the host waits for the device in each layer. Replaying the recorded step does
neither. See https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs.
"""

import contextlib
from argparse import Namespace
from collections.abc import Iterator

import torch
from torch import Tensor

from ..train_eval_utils import TrainStep, keep_frozen_statistics

# DistributedDataParallel counts its first ten iterations with events of its own, which a capture
# does not allow: it must have taken more than that before.
WARM_UP_STEPS = 11


@contextlib.contextmanager
def capture_stream(device: torch.device) -> Iterator[torch.cuda.Stream | None]:
    """The stream on which a step will warm up and be captured, made current; None on the CPU.

    Model and DistributedDataParallel must be made on it.
    """
    if device.type != "cuda":
        yield None
        return
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield stream
    torch.cuda.current_stream().wait_stream(stream)


def why_not_captured(args: Namespace, device: torch.device) -> str | None:
    """Why the step cannot be a CUDA graph, None where it can."""
    if device.type != "cuda":
        return "CUDA graphs exist on GPUs only"
    if not args.cuda_graph:
        return "--no-cuda-graph"
    if args.dist_backend == "gloo":
        return "gloo's collectives cannot be captured"
    return None


class CapturedStep(TrainStep):
    """The TrainStep ``step`` by replay; batches keep the shapes and dtypes of ``example``.

    Warming up leaves weights, momentum and statistics as they were.
    """

    def __init__(self, step: TrainStep, example: tuple[Tensor, ...],
                 stream: torch.cuda.Stream) -> None:
        self.__dict__.update(step.__dict__)  # the same model, optimizer and scaler
        self.inputs = [t.clone() for t in example]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            warm_up(step, self.inputs, WARM_UP_STEPS)
        stream.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        # thread_local: a thread that pins memory for the loader must not break the capture.
        with torch.cuda.graph(self.graph, stream=stream, capture_error_mode="thread_local"):
            self.loss = step(*self.inputs)
        torch.cuda.current_stream().wait_stream(stream)

    def __call__(self, *batch: Tensor) -> Tensor:
        for own, given in zip(self.inputs, batch, strict=True):
            if own.shape != given.shape or own.dtype != given.dtype:
                raise ValueError(f"the captured step takes {tuple(own.shape)} {own.dtype}, "
                                 f"not {tuple(given.shape)} {given.dtype}")
            own.copy_(given, non_blocking=True)
        self.graph.replay()
        return self.loss

    def close(self) -> None:
        """Let go of the graph, which holds on to NCCL's communicator.

        NCCL waits, when a communicator is destroyed, until no graph refers to it any more: without
        this the process would never leave its group.
        """
        torch.cuda.synchronize()
        self.graph.reset()


def warm_up(step: TrainStep, batch: list[Tensor] | tuple[Tensor, ...], steps: int) -> None:
    """Take ``steps`` steps that leave no trace.

    DistributedDataParallel orders its buckets by the first backward pass, cuDNN chooses its
    kernels, the optimiser allocates its momentum: after this every step is like the next.
    """
    changed = [*step.model.state_dict().values(), *(
        value for state in step.optimizer.state.values() for value in state.values()
        if isinstance(value, Tensor))]
    before, scaler = [value.clone() for value in changed], step.scaler.state_dict()
    random_state = torch.get_rng_state()
    step.model.train()
    keep_frozen_statistics(step.model)
    for _ in range(steps):
        step(*batch)
    step.optimizer.zero_grad(set_to_none=True)
    known = {id(value) for value in changed}
    with torch.no_grad():
        for value, old in zip(changed, before, strict=True):
            value.copy_(old)
        for state in step.optimizer.state.values():
            for value in state.values():
                if isinstance(value, Tensor) and id(value) not in known:
                    value.zero_()  # made by the first step: Adam's averages and count begin at 0
    if scaler:
        step.scaler.load_state_dict(scaler)
    torch.set_rng_state(random_state)
