"""A training step as one CUDA graph: launched once, not kernel by kernel.

At a batch of 16 a step's kernels run for less time than the host needs to launch them, and with
SyncBatchNorm the host waits for the device in each layer. Replaying the recorded step does
neither. See https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs.
"""

import torch

from .train_step import warm_up

# DistributedDataParallel counts its first ten iterations with events of its own, which a capture
# does not allow: it must have taken more than that before.
WARM_UP_STEPS = 11


class CapturedStep:
    """``step(*batch)`` by replay; ``batch`` must keep the shapes and dtypes of ``example``.

    Model and DistributedDataParallel must have been made on ``stream``, where the step warms up
    and is captured. Warming up leaves weights, momentum and statistics as they were.
    """

    def __init__(self, step, example, stream):
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

    def __call__(self, *batch):
        for own, given in zip(self.inputs, batch, strict=True):
            if own.shape != given.shape or own.dtype != given.dtype:
                raise ValueError(f"the captured step takes {tuple(own.shape)} {own.dtype}, "
                                 f"not {tuple(given.shape)} {given.dtype}")
            own.copy_(given, non_blocking=True)
        self.graph.replay()
        return self.loss

    def release(self):
        """Let go of the graph, which holds on to NCCL's communicator.

        NCCL waits, when a communicator is destroyed, until no graph refers to it any more: without
        this the process would never leave its group.
        """
        torch.cuda.synchronize()
        self.graph.reset()
