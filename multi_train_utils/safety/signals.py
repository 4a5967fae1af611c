"""Signals that ask for a stop: noted, agreed on by the ranks, obeyed at the end of a step."""

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from multiprocessing.process import BaseProcess
from types import FrameType, TracebackType

from .ending import Interrupted, PeerFailed, leave, tell
from .torch_errors import is_lost_peer

DEADLINE = 10.0  # seconds between a signal and the end, saved or not
STOP_SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP")
                     if hasattr(signal, name))


class SignalWatch:
    """Turns SIGINT, SIGTERM, SIGUSR1 (SLURM's warning) and SIGHUP into a stop in good order.

    At first a signal raises Interrupted at once. After defer() it is only noted in ``received``,
    for the ranks to agree on the step after which they stop. Either way a second signal, or
    DEADLINE seconds, ends the process at once, even where the main thread waits inside a library:
    a thread of its own hears the signals.
    """

    def __init__(self) -> None:
        self.received = 0
        self._deferred = self._passed_on = False

    def defer(self) -> None:
        """From now on only note a signal."""
        self._deferred = True

    def __enter__(self) -> "SignalWatch":
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._old_wakeup = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._old = {s: signal.signal(s, self._handle) for s in STOP_SIGNALS if not self._nohup(s)}
        threading.Thread(target=self._listen, name="watch-signals", daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        if self.received and (isinstance(error, PeerFailed) or is_lost_peer(error)):
            # The launcher ends us because a peer died: nothing to save, nothing to say.
            leave(128 + self.received)
        for signum, handler in self._old.items():
            signal.signal(signum, handler)
        signal.set_wakeup_fd(self._old_wakeup)
        self._writer.close()

    @staticmethod
    def _nohup(signum: int) -> bool:
        """True for a SIGHUP that nohup has switched off; torchrun passes it on all the same."""
        return (signal.Signals(signum).name == "SIGHUP" and "TORCHELASTIC_RUN_ID" not in os.environ
                and signal.getsignal(signum) is signal.SIG_IGN)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        first, self.received = not self.received, self.received or signum
        if first and not self._deferred:
            raise Interrupted(signum)

    def _listen(self) -> None:
        first = 0.0
        while True:
            if first:
                self._reader.settimeout(max(0.01, first + DEADLINE - time.monotonic()))
            try:
                heard = self._reader.recv(1)
            except TimeoutError:
                tell(f"not stopped within {DEADLINE:g} s of the signal: leaving now")
                leave(128 + self.received)
            if not heard:
                return self._reader.close()
            if heard[0] not in STOP_SIGNALS:
                continue
            # Launchers may send the same signal twice in a row: that is one wish, not two.
            if first and time.monotonic() - first > 0.5:
                leave(128 + heard[0])
            first = first or time.monotonic()

    def pass_on(self, processes: Sequence[BaseProcess]) -> None:
        """Send the signal received, if any, to each of the processes once."""
        if self.received and not self._passed_on:
            self._passed_on = True
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid or 0, self.received)


@contextlib.contextmanager
def signals_held_back() -> Iterator[None]:
    """Processes started inside never receive SIGINT or SIGTERM: only the trainer decides."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    old = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old)
