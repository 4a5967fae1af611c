"""What the ranks tell each other on the host, beside the GPUs' collectives."""

import contextlib
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from .distributed_utils import wait_for_all
from .failures import leave, report

# Seconds beyond --timeout after which a rank whose GPU stands still gives up. Peers that wait in a
# meeting, and can tell who is missing, give up before it.
MARGIN = 2.0


class Control:
    """Meetings of all ranks in a gloo group of their own.

    A dead peer breaks it at once, a silent one after ``args.timeout`` seconds, while a GPU
    collective would stand still.
    """

    def __init__(self, args):
        self.args, self.rank, self.world_size = args, args.rank, args.world_size
        self.group, self.starting, self.meetings = None, True, 0
        self.moving()
        if args.distributed:
            self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=args.timeout))

    def largest(self, *values):
        """The largest of each of the ints over all ranks, as a tuple."""
        if self.world_size < 2:
            return values
        self._meet()
        tensor = torch.tensor(values)
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.group)
        return tuple(tensor.tolist())

    def gather(self, value):
        """List of every rank's ``value`` (picklable), in order of rank, on all ranks."""
        if self.world_size < 2:
            return [value]
        self._meet()
        values = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def first(self, value):
        """Rank 0's ``value`` (picklable), on all ranks."""
        if self.world_size < 2:
            return value
        self._meet()
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.group)
        return box[0]

    def _meet(self):
        """Until training runs, ranks may take long to come: wait for them with the long limit."""
        self.moving()
        if self.starting:
            self.meetings += 1
            wait_for_all(self.args.store, f"start-up point {self.meetings}", self.rank,
                         self.world_size, self.args.startup_timeout)

    def moving(self):
        """This rank gets on with its work; to be called in long work without meetings."""
        self.moved = time.monotonic()

    @contextlib.contextmanager
    def watched(self):
        """Inside, a rank that waits too long for its GPU ends, and names the peers to blame.

        A GPU in the middle of a collective waits for a dead or frozen peer for ever. Its main
        thread, waiting for a result, waits with it, where no exception reaches it.
        """
        self.moving()
        over = threading.Event()
        if self.args.dist_backend == "nccl" and self.world_size > 1:  # alone it meets nobody
            threading.Thread(target=self._watch, args=(over,), name="watch-peers",
                             daemon=True).start()
        try:
            yield
        finally:
            over.set()

    def _watch(self, over):
        limit = self.args.timeout + MARGIN
        while not over.wait(0.5):
            if time.monotonic() - self.moved > limit:
                report(ConnectionAbortedError("the GPU has not finished a collective for longer "
                                              f"than --timeout {self.args.timeout:g} s"), self.args)
                leave(1)
