"""What the ranks tell each other on the host, beside the GPUs' collectives."""

import contextlib
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from ..train_eval_utils import EpochMeter, LossGuard
from .ending import Interrupted, PeerFailed, leave, report
from .patience import Watch
from .rendezvous import wait_for_all
from .signals import SignalWatch

# Seconds beyond --timeout after which a rank whose GPU stands still gives up. Peers that wait in a
# meeting, and can tell who is missing, give up before it.
MARGIN = 2.0
WORKERS_SHARE = 0.9  # of --timeout; less, so that the process with the cause is the first to tell
# The libraries' own limits in training: they would count a time in which the whole job slept.
FAR_AWAY = timedelta(days=7)


class Guard(LossGuard):
    """Meetings of all ranks in a gloo group of their own, and what may end a run at them.

    A dead peer breaks a meeting at once. A silent one is given up after ``args.timeout`` seconds,
    by a thread, for a GPU's collective would stand still for ever. Signals and losses that are
    not finite end a run at a step on which all ranks agree.
    """

    def __init__(self, args: Namespace) -> None:
        self.args, self.rank, self.world_size = args, args.rank, args.world_size
        self.group: Any = None
        self._training, self._meetings = False, 0
        self._signals, self._watch = SignalWatch(), Watch(self._too_late)

    def __enter__(self) -> "Guard":
        self._signals.__enter__()
        self._watch.__enter__()
        if self.world_size > 1:
            limit = timedelta(seconds=self.args.startup_timeout)
            self.group = dist.new_group(backend="gloo", timeout=limit)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self._watch.__exit__(kind, error, trace)
        self._signals.__exit__(kind, error, trace)

    # ---- meetings ----

    def largest(self, *values: int) -> tuple[int, ...]:
        """The largest of each of the ints over all ranks."""
        if self.world_size < 2:
            return values
        with self._meeting():
            tensor = torch.tensor(values)
            dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.group)
            return tuple(tensor.tolist())

    def gather(self, value: Any) -> list[Any]:
        """Every rank's ``value`` (picklable), in order of rank, on all ranks."""
        if self.world_size < 2:
            return [value]
        with self._meeting():
            values = [None] * self.world_size
            dist.all_gather_object(values, value, group=self.group)
            return values

    def first(self, value: Any) -> Any:
        """Rank 0's ``value`` (picklable), on all ranks."""
        if self.world_size < 2:
            return value
        with self._meeting():
            box = [value]
            dist.broadcast_object_list(box, src=0, group=self.group)
            return box[0]

    def barrier(self) -> None:
        """Until all ranks have come here."""
        self.largest(0)

    @contextlib.contextmanager
    def _meeting(self) -> Iterator[None]:
        if self._training:
            self._watch.expect("a peer", self.args.timeout)
        else:  # ranks may take long to come: wait for them with the long limit
            self._meetings += 1
            wait_for_all(self.args.store, f"start-up point {self._meetings}", self.rank,
                         self.world_size, self.args.startup_timeout)
        yield
        self.moving()

    # ---- patience ----

    def moving(self) -> None:
        """This rank gets on with its work."""
        watched = self._training and self.world_size > 1  # alone it waits for nobody
        self._watch.expect("the GPU", self.args.timeout + MARGIN if watched else None)

    def fetched(self, batches: Iterator) -> Iterator:
        """The batches of a DataLoader's workers; workers that send nothing for long end the run."""
        while True:
            self._watch.expect("the workers", WORKERS_SHARE * self.args.timeout)
            batch = next(batches, None)
            self.moving()
            if batch is None:
                return
            yield batch

    def _too_late(self, waiting_for: str) -> None:
        """End this process from the watching thread: its main thread waits inside a library."""
        limit = f"{self.args.timeout:g} s"
        error: OSError = ConnectionAbortedError(
            f"{waiting_for} has been silent for longer than --timeout {limit}"
            if waiting_for == "a peer" else
            f"{waiting_for} has not finished a collective for longer than --timeout {limit}")
        if waiting_for == "the workers":
            error = TimeoutError(
                f"the loader workers sent nothing for {WORKERS_SHARE:.0%} of --timeout {limit}: a "
                "disk that does not answer, too few open files allowed (ulimit -n), or too little "
                "shared memory (/dev/shm)? Try --workers 0, or a longer --timeout.")
        report(error, self.args)
        leave(1)

    # ---- what ends a run in good order ----

    @contextlib.contextmanager
    def training(self, *closing: Callable[[], None]) -> Iterator[None]:
        """Inside, the ranks agree on the step at which a signal or a bad loss ends the run.

        ``closing`` is called at the good end and after such a stop; after any other failure
        nothing is waited for.
        """
        self._signals.defer()
        self.barrier()
        for group in [None, self.group] if self.world_size > 1 else []:
            # torch 2.14 has a public name for it.
            set_timeout = getattr(dist, "set_timeout", None) or \
                dist.distributed_c10d._set_pg_timeout
            set_timeout(FAR_AWAY, group)
        self._training = True
        self.moving()
        try:
            yield
        except Exception as error:
            if not isinstance(error, Interrupted):
                raise
            for close in closing:
                close()
            raise
        for close in closing:
            close()

    def after_step(self, meter: EpochMeter) -> None:
        """Agree with all ranks: a loss that is not finite, or a signal, ends the run here."""
        bad = meter.first_bad()
        signum, any_bad = self.largest(self._signals.received, int(bad is not None))
        if any_bad:
            self._fail(bad, meter)
        if signum:
            self._stop(signum, meter)

    def after_training(self, meter: EpochMeter) -> None:
        """A look at every loss of the epoch so far; waits for the GPU."""
        bad = meter.last_bad()
        if self.largest(int(bad is not None))[0]:
            self._fail(bad, meter)

    def stoppable(self, batches: Iterable, meter: EpochMeter) -> Iterator:
        """The validation batches; between them the ranks agree whether a signal came.

        Ranks may have different numbers of them. The epoch's training counts as done.
        """
        batches = iter(batches)
        while True:
            batch = next(batches, None)
            signum, any_left = self.largest(self._signals.received, int(batch is not None))
            if signum:
                self._stop(signum, meter)
            if not any_left:
                return
            if batch is not None:
                yield batch

    def _stop(self, signum: int, meter: EpochMeter) -> None:
        self.after_training(meter)
        loss_sum, images = meter.totals()
        raise Interrupted(signum, meter.place()._replace(loss_sum=loss_sum, loss_images=images))

    def _fail(self, bad: tuple[int, float] | None, meter: EpochMeter) -> None:
        """Raise on all ranks; the one that met it first (the lowest, of several) says so."""
        found = [(one[0], rank, one[1]) for rank, one in enumerate(self.gather(bad))
                 if one is not None]
        step, rank, value = min(found, key=lambda entry: entry[:2])
        if rank != self.rank:
            raise PeerFailed
        raise FloatingPointError(
            f"epoch {meter.begin.epoch}, step {step}: the loss is {value}. Nothing of this epoch "
            "is saved. Is the learning rate too high (--lr), or a weight file damaged "
            "(--weights)?")
