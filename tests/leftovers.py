"""Whether what a test started has ended, for the tests that look."""

import time
from pathlib import Path

import pytest

LINUX = pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for processes in /proc")


def no_processes_with(word):
    """True once no process has `word` in its command line; waits a little for the last to go."""
    for _ in range(100):
        alive = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                alive += [path] if word.encode() in path.read_bytes() else []
            except OSError:
                continue
        if not alive:
            return True
        time.sleep(0.1)
    return False
