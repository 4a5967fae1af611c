"""Processes that the spawn script starts: each in a session of its own, watched together."""

import contextlib
import os
import signal
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess

from .ending import run, tell
from .signals import SignalWatch


def run_rank(main_fun: Callable[[int, int, Namespace], None], rank: int, world_size: int,
             args: Namespace) -> None:
    """What a new process does: ``main_fun``, in a session of its own.

    So Ctrl-C reaches it once, from the process that watches it, and not from the terminal too.
    """
    if hasattr(os, "setsid"):
        os.setsid()
    run(lambda args: main_fun(rank, world_size, args), args)


@contextlib.contextmanager
def watched(processes: Sequence[BaseProcess]) -> Iterator[None]:
    """Waits, at the end of the block that started them, until all have ended.

    The first process that fails ends the others, signals are passed on. Raises ``SystemExit``
    with the status of the first that failed.
    """
    with SignalWatch() as signals:
        signals.defer()
        yield
        alive = list(processes)
        while alive and not any(process.exitcode for process in processes):
            wait([process.sentinel for process in alive], timeout=0.2)
            signals.pass_on(processes)
            alive = [process for process in alive if process.is_alive()]
        end_processes(processes)


def end_processes(processes: Sequence[BaseProcess], patience: float = 3.0) -> None:
    """End what is left of the processes; raise SystemExit with the first failure's status.

    Says so where a process was killed and could not speak for itself. Returns where all ended well.
    """
    failed = [(rank, process.exitcode) for rank, process in enumerate(processes)
              if process.exitcode]
    for process in processes:
        process.terminate()
    end = time.monotonic() + patience
    for process in processes:
        process.join(max(0.0, end - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()
    if not failed:
        return
    rank, code = failed[0]
    if code < 0:
        name = signal.Signals(-code).name
        hint = " (out of memory?)" if name == "SIGKILL" else ""
        tell(f"error: rank {rank} of {len(processes)} was killed by {name}{hint}")
    raise SystemExit(128 - code if code < 0 else code)
