"""The output folder belongs to one run at a time."""

import time
from argparse import Namespace
from pathlib import Path
from typing import IO

from utils import write_error


def claim(args: Namespace) -> IO[str]:
    """Hold the output folder: a second job there would overwrite the first one's weights.

    Waits up to 20 s for a dying predecessor; then raises ``ValueError`` naming --output-dir. The
    lock goes with the returned file, or with the process, however it ends.
    """
    folder = Path(args.output_dir)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--output-dir {folder} is a file: give a folder, or a name that is "
                         "still free")
    path = folder / ".output.lock"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(path, "a")
    except OSError as error:
        raise write_error(path, error) from error
    wait_for_lock(lock, folder)
    return lock


def wait_for_lock(lock: IO[str], folder: Path, limit: float = 20.0) -> None:
    """Lock the open file, waiting up to ``limit`` seconds for another process to leave it."""
    try:
        import fcntl
    except ImportError:  # no such locks on Windows
        return
    end = time.monotonic() + limit
    while True:
        try:
            # lockf: not inherited by loader workers, which may outlive a killed trainer a little.
            return fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if time.monotonic() > end:
                raise ValueError(f"another run is writing to {folder.resolve()}: wait for it, or "
                                 "give this one its own --output-dir") from error
            time.sleep(0.2)
