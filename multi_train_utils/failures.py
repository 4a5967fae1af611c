"""How a run ends when it does not end well: one message, no process left behind.

Every process of a run calls ``run(main, args)``. The first rank that fails prints its cause, once;
the others, whose collectives break because of it, leave without a word. Signals, a launcher that
died and a peer that stays silent end here too.
"""

import contextlib
import importlib
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
import traceback
from pathlib import Path

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler
from torch.utils.data import dataloader

from .distributed_utils import is_first_on_machine

DEADLINE = 10.0  # seconds between a signal and the end, saved or not
PROJECT = Path(__file__).resolve().parents[1]
STOP_SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP")
                     if hasattr(signal, name))

# Files to remove should the process have to leave in the middle of writing them.
unfinished_files = set()


class Interrupted(Exception):
    """A signal stopped the run in good order."""

    def __init__(self, signum):
        super().__init__(signum)
        self.signum = signum


class PeerFailed(Exception):
    """Another rank has failed and says why; this one only leaves."""


def run(main, args):
    """Call ``main(args)``; on failure print the cause once and end with the right exit status.

    0 done, 1 failed, 130 / 143 / 138 / 129 stopped by SIGINT / SIGTERM / SIGUSR1 / SIGHUP. Never
    returns: after a failure the process leaves without waiting for collectives that no peer will
    join.
    """
    for stream in (sys.stdout, sys.stderr):
        # Line by line also into a file, so that the cause of a failure is the last line there;
        # and names that the terminal's encoding cannot say are spelled out.
        stream.reconfigure(line_buffering=True, errors="backslashreplace")
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


def start_slow_imports():
    """Import what the optimiser and the log will ask for, 3 s on their own; returns the thread.

    To be joined before a process is forked: forked in the middle of an import, it may hang.
    """
    thread = threading.Thread(target=import_slow_modules, name="slow-imports", daemon=True)
    thread.start()
    return thread


def import_slow_modules():
    for name in ("torch._dynamo", "torch.utils.tensorboard", "matplotlib.figure"):
        with contextlib.suppress(Exception):  # if it is needed and fails, it fails there
            importlib.import_module(name)


def report(error, args):
    """Print why this rank failed, unless another rank's failure is the reason."""
    store, world_size = getattr(args, "store", None), getattr(args, "world_size", 1)
    if store is None:
        # No group yet: ranks of a machine fail alike, so one of them speaks.
        if not is_first_on_machine():
            time.sleep(2)  # a launcher has ended this rank by then
        speak(error, args)
        return
    lost = isinstance(error, PeerFailed) or is_lost_peer(error)
    try:
        if lost and world_size > 1:
            error = blame(store, args, error)
        if error is not None and store.compare_set("failure", "", str(args.rank)) == str(
                args.rank).encode():
            speak(error, args)
            return
    except (dist.DistError, RuntimeError):  # the store went with rank 0
        if not lost:
            speak(error, args)
            return
    # Let the launcher see the true culprit first: it reports the earliest failure as the cause.
    time.sleep(2)


def speak(error, args):
    """Print the cause for a person, and record it for torchrun's report."""
    rank, world_size = getattr(args, "rank", 0), getattr(args, "world_size", 1)
    where = f" (rank {rank} of {world_size} on {socket.gethostname()})" if world_size > 1 else ""
    if is_lost_worker(error):
        error = ChildProcessError(
            f"a loader worker died ({str(error).strip()}): out of memory, or too little shared "
            "memory (/dev/shm)? Try --workers 0 or fewer, or a smaller --batch-size.")
    elif "DataLoader timed out" in str(error):
        error = TimeoutError(
            f"the loader workers sent nothing ({error}): a disk that does not answer, too few "
            "open files allowed (ulimit -n), or too little shared memory (/dev/shm)? Try "
            "--workers 0, or a longer --timeout.")
    text = "".join(traceback.format_exception(error)) if not raised_here(error) else ""
    name = "" if type(error) in (ValueError, RuntimeError) else f"{type(error).__name__}: "
    text += f"error{where}: {name}{error}"
    try:
        raise error  # torchrun's recorder looks at the exception being handled
    except BaseException:
        with contextlib.suppress(OSError, RuntimeError, ValueError):
            get_error_handler().record_exception(error)
    tell(text)


def tell(text):
    """Print on stderr, where there is still one."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def raised_here(error):
    """True where our own code raised the error: its message says it all, no traceback needed."""
    frames = list(traceback.walk_tb(error.__traceback__))
    if not frames:
        return True
    file = Path(frames[-1][0].f_code.co_filename).resolve()
    ours = file.is_relative_to(PROJECT) and "site-packages" not in file.parts
    return ours and isinstance(error, (ValueError, OSError, FloatingPointError))


def is_lost_worker(error):
    """True for the errors by which a DataLoader tells that one of its workers is gone."""
    if isinstance(error, RuntimeError):  # torch raises it wherever the main thread stands
        return "DataLoader worker (pid" in str(error)
    if "in DataLoader worker process" in str(error):  # raised by the reader's dataset, over there
        return False
    # A batch is fetched from its worker, which died in the middle of it.
    return isinstance(error, (ConnectionError, EOFError)) and any(
        frame.f_code.co_filename == dataloader.__file__
        for frame, _ in traceback.walk_tb(error.__traceback__))


def is_lost_peer(error):
    """True for the errors by which a collective tells that a peer is gone or silent."""
    if isinstance(error, (dist.DistError, ConnectionAbortedError)):
        return True
    signs = ("gloo", "NCCL", "Connection closed", "Connection reset", "Broken pipe", "Socket")
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)


def blame(store, args, error):
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


def leave(status):
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


def watch_parent():
    """End this process when the launcher that started it has gone, however it died."""
    spawner = multiprocessing.parent_process()
    if spawner is None and "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    launcher = os.getppid()
    # It may have died while this process was still importing torch.
    lost = spawner is None and launcher == 1 and not is_launcher(launcher)

    def has_gone():
        return lost or (os.getppid() != launcher if spawner is None else not spawner.is_alive())

    def watch():
        while not has_gone():
            time.sleep(0.5)
        leave(1)

    threading.Thread(target=watch, name="watch-parent", daemon=True).start()


def is_launcher(pid):
    """False where the process, by its name, is no Python program: an orphan's new parent, say."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().startswith(("python", "torchrun", "pt_"))
    except OSError:  # not on Linux
        return True


class SignalWatch:
    """Turns SIGINT, SIGTERM, SIGUSR1 (SLURM's warning) and SIGHUP into a stop in good order.

    While ``deferred`` is False a signal raises Interrupted at once. Once it is True the signal is
    only noted in ``received``, for the ranks to agree on the step after which they stop. Either
    way a second signal, or DEADLINE seconds, ends the process at once, even where the main thread
    waits inside a library: a thread of its own hears the signals.
    """

    def __init__(self, deferred=False):
        self.deferred = deferred
        self.received = 0
        self._passed_on = False

    def __enter__(self):
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._old_wakeup = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._old = {s: signal.signal(s, self._handle) for s in STOP_SIGNALS if not self._nohup(s)}
        threading.Thread(target=self._listen, name="watch-signals", daemon=True).start()
        return self

    def __exit__(self, _type, error, _traceback):
        if self.received and (isinstance(error, PeerFailed) or is_lost_peer(error)):
            # The launcher ends us because a peer died: nothing to save, nothing to say.
            leave(128 + self.received)
        for signum, handler in self._old.items():
            signal.signal(signum, handler)
        signal.set_wakeup_fd(self._old_wakeup)
        self._writer.close()

    @staticmethod
    def _nohup(signum):
        """True for a SIGHUP that nohup has switched off; torchrun passes it on all the same."""
        return (signal.Signals(signum).name == "SIGHUP" and "TORCHELASTIC_RUN_ID" not in os.environ
                and signal.getsignal(signum) is signal.SIG_IGN)

    def _handle(self, signum, _frame):
        first, self.received = not self.received, self.received or signum
        if first and not self.deferred:
            raise Interrupted(signum)

    def _listen(self):
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

    def pass_on(self, processes):
        """Send the signal received, if any, to each of the processes once."""
        if self.received and not self._passed_on:
            self._passed_on = True
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, self.received)


def end_processes(processes, patience=3.0):
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


def host_store(wanted=None):
    """A key-value store in this process for the ranks to meet at; sets MASTER_PORT to its port.

    Listens on ``wanted``, else on MASTER_PORT, else on 12355 or, where that is taken, on a free
    port: only a port that nobody chose gives way. ``OSError`` where the port chosen is taken.
    """
    chosen = wanted if wanted is not None else os.environ.get("MASTER_PORT")
    for port in (12355, 0) if chosen is None else (int(chosen),):
        with contextlib.suppress(dist.DistNetworkError):
            store = dist.TCPStore("localhost", port, is_master=True, wait_for_workers=False)
            os.environ.update(MASTER_PORT=str(store.port), TORCHELASTIC_USE_AGENT_STORE="True")
            return store
    raise OSError(f"port {chosen} is taken: give another with --master-port, or none")


@contextlib.contextmanager
def signals_held_back():
    """Processes started inside never receive SIGINT or SIGTERM: only the trainer decides."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    old = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old)
