"""How a run ends when it does not end well: one message, no process left behind.

Every process of a run calls ``run(main, args)``. The first rank that fails prints its cause, once;
the others, whose collectives break because of it, leave without a word.
"""

import contextlib
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
import traceback
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from utils import unfinished_files

from ..distributed_utils import is_first_on_machine
from ..train_eval_utils import Place
from .torch_errors import is_lost_peer, is_lost_worker

PROJECT = Path(__file__).resolve().parents[2]


class Interrupted(Exception):
    """A signal stopped the run, where the ranks had agreed: at ``place``, else None.

    The losses in ``place`` are those of this process.
    """

    def __init__(self, signum: int, place: Place | None = None) -> None:
        super().__init__(signum)
        self.signum, self.place = signum, place


class PeerFailed(Exception):
    """Another rank has failed and says why; this one only leaves."""


def run(main: Callable[[Any], None], args: Namespace) -> NoReturn:
    """Call ``main(args)``; on failure print the cause once and end with the right exit status.

    0 done, 1 failed, 130 / 143 / 138 / 129 stopped by SIGINT / SIGTERM / SIGUSR1 / SIGHUP. Never
    returns: after a failure the process leaves without waiting for collectives that no peer will
    join.
    """
    for stream in (sys.stdout, sys.stderr):
        # Line by line also into a file, so that the cause of a failure is the last line there;
        # and names that the terminal's encoding cannot say are spelled out.
        stream.reconfigure(  # type: ignore[union-attr]
            line_buffering=True, errors="backslashreplace")
    watch_parent()
    try:
        main(args)
        leave(0)  # nothing is left to do: taking down a CUDA context in good order takes a second
    except Interrupted as stop:
        leave(128 + stop.signum)
    except KeyboardInterrupt:
        leave(128 + signal.SIGINT)
    except SystemExit as stop:
        leave(stop.code if isinstance(stop.code, int) else int(stop.code is not None))
    except BaseException as error:
        report(error, args)
        leave(1)


def report(failure: BaseException, args: Namespace) -> None:
    """Print why this rank failed, unless another rank's failure is the reason."""
    store, world_size = getattr(args, "store", None), getattr(args, "world_size", 1)
    error: BaseException | None = failure
    if store is None:
        # No group yet: ranks of a machine fail alike, so one of them speaks.
        if not is_first_on_machine():
            time.sleep(2)  # a launcher has ended this rank by then
        speak(failure, args)
        return
    lost = isinstance(failure, PeerFailed) or is_lost_peer(failure)
    try:
        if lost and world_size > 1:
            error = blame(store, args, failure)
        if error is not None and store.compare_set("failure", "", str(args.rank)) == str(
                args.rank).encode():
            speak(error, args)
            return
    except (dist.DistError, RuntimeError):  # the store went with rank 0
        if not lost:
            speak(failure, args)
            return
    # Let the launcher see the true culprit first: it reports the earliest failure as the cause.
    time.sleep(2)


def speak(error: BaseException, args: Namespace) -> None:
    """Print the cause for a person, and record it for torchrun's report."""
    rank, world_size = getattr(args, "rank", 0), getattr(args, "world_size", 1)
    where = f" (rank {rank} of {world_size} on {socket.gethostname()})" if world_size > 1 else ""
    if is_lost_worker(error):
        error = ChildProcessError(
            f"a loader worker died ({str(error).strip()}): out of memory, or too little shared "
            "memory (/dev/shm)? Try --workers 0 or fewer, or a smaller --batch-size.")
    text = "".join(traceback.format_exception(error)) if not raised_here(error) else ""
    name = "" if type(error) in (ValueError, RuntimeError) else f"{type(error).__name__}: "
    text += f"error{where}: {name}{error}"
    try:
        raise error  # torchrun's recorder looks at the exception being handled
    except BaseException:
        with contextlib.suppress(OSError, RuntimeError, ValueError):
            get_error_handler().record_exception(error)
    tell(text)


def tell(text: str) -> None:
    """Print on stderr, where there is still one."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def raised_here(error: BaseException) -> bool:
    """True where our own code raised the error: its message says it all, no traceback needed."""
    frames = list(traceback.walk_tb(error.__traceback__))
    if not frames:
        return True
    file = Path(frames[-1][0].f_code.co_filename).resolve()
    ours = file.is_relative_to(PROJECT) and "site-packages" not in file.parts
    return ours and isinstance(error, (ValueError, OSError, FloatingPointError))


def blame(store: dist.Store, args: Namespace, error: BaseException) -> BaseException | None:
    """After a broken collective: None where a rank has said why, else who does not answer."""
    store.set(f"alive/{args.rank}", "")
    end = time.monotonic() + 4  # a launcher ends us before that, and reports for itself
    while time.monotonic() < end:
        if store.check(["failure"]):
            return None
        time.sleep(0.2)
    silent = [rank for rank in range(args.world_size) if not store.check([f"alive/{rank}"])]
    if not silent:
        return error
    ranks = ", ".join(map(str, silent))
    return ConnectionError(f"rank {ranks} does not answer: it ended without a word, or stood "
                           f"still for longer than --timeout {getattr(args, 'timeout', 0):g} s")


def leave(status: int) -> NoReturn:
    """End this process now, with its loader workers and without its unfinished files."""
    for path in list(unfinished_files):
        with contextlib.suppress(OSError):
            os.unlink(path)
    if threading.current_thread() is threading.main_thread() and hasattr(signal, "SIGCHLD"):
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler would raise right here
    for child in multiprocessing.active_children():
        child.kill()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


def watch_parent() -> None:
    """End this process when the launcher that started it has gone, however it died."""
    spawner = multiprocessing.parent_process()
    if spawner is None and "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    launcher = os.getppid()
    # It may have died while this process was still importing torch.
    lost = spawner is None and launcher == 1 and not is_launcher(launcher)

    def has_gone() -> bool:
        return lost or (os.getppid() != launcher if spawner is None else not spawner.is_alive())

    def watch() -> None:
        while not has_gone():
            time.sleep(0.5)
        leave(1)

    threading.Thread(target=watch, name="watch-parent", daemon=True).start()


def is_launcher(pid: int) -> bool:
    """False where the process, by its name, is no Python program: an orphan's new parent, say."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().startswith(("python", "torchrun", "pt_"))
    except OSError:  # not on Linux
        return True
