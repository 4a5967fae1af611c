"""Modules that take seconds to import come in beside the start."""

import contextlib
import importlib
import threading

NAMES = ("torch._dynamo", "torch.utils.tensorboard", "matplotlib.figure")


def start_slow_imports() -> threading.Thread:
    """Import what the optimiser and the log will ask for, 3 s on their own; returns the thread.

    To be joined before a process is forked: forked in the middle of an import, it may hang.
    """
    thread = threading.Thread(target=import_all, name="slow-imports", daemon=True)
    thread.start()
    return thread


def import_all() -> None:
    for name in NAMES:
        with contextlib.suppress(Exception):  # if it is needed and fails, it fails there
            importlib.import_module(name)
