"""Time limits that do not count sleep.

The whole job may be suspended (Ctrl-Z, a batch system, a laptop's lid). The libraries' own limits
run on meanwhile, and all would give up at the moment of waking.
"""

import threading
import time
from collections.abc import Callable
from types import TracebackType

TICK = 0.5  # seconds between two looks of the watching thread
LONGEST_TICK = 2.0  # of more than this between two looks, the rest was sleep


class Patience:
    """Counts the seconds in which this process ran itself, up to ``limit``."""

    def __init__(self, limit: float) -> None:
        self.limit, self.spent, self.looked = limit, 0.0, time.monotonic()

    def over(self) -> bool:
        """True once ``limit`` seconds are spent; to be asked every two seconds at least."""
        now = time.monotonic()
        self.spent += min(now - self.looked, LONGEST_TICK)
        self.looked = now
        return self.spent > self.limit


class Watch:
    """A thread that calls ``too_late(waiting_for)`` where the main thread waits for too long.

    The main thread says with expect() what it waits for; where it waits inside a library, no
    exception would reach it.
    """

    def __init__(self, too_late: Callable[[str], None]) -> None:
        self._too_late, self._over = too_late, threading.Event()
        self.expect("nothing", None)

    def expect(self, waiting_for: str, limit: float | None) -> None:
        """From now on the main thread waits for this, ``limit`` seconds at most (None: for ever).

        Begins to count anew in each call, so to be called whenever there is progress.
        """
        self._waiting = (waiting_for, limit)  # a new object: the thread sees that it has changed

    def __enter__(self) -> "Watch":
        threading.Thread(target=self._look, name="watch-waiting", daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self._over.set()

    def _look(self) -> None:
        seen, patience = None, Patience(0.0)
        while not self._over.wait(TICK):
            waiting = self._waiting
            if waiting is not seen:
                seen, patience = waiting, Patience(waiting[1] or 0.0)
            elif waiting[1] is not None and patience.over():
                self._too_late(waiting[0])
                return
