"""Time limits count only the time in which a process ran itself."""

import threading
import time

import pytest

from multi_train_utils.safety import patience
from multi_train_utils.safety.patience import LONGEST_TICK, Patience, Watch


@pytest.fixture
def clock(monkeypatch):
    """A clock that a test sets; ``clock.asked`` says that it was looked at."""
    class Clock:
        now, asked = 100.0, 0

        def monotonic(self):
            self.asked += 1
            return self.now

    clock = Clock()
    monkeypatch.setattr(patience, "time", clock)
    return clock


def test_seconds_awake_count(clock):
    limit = Patience(5)
    for _ in range(10):
        clock.now += 0.5
        assert not limit.over()
    clock.now += 0.5
    assert limit.over()
    assert clock.asked == 12


def test_a_gap_is_sleep(clock):
    limit = Patience(5)
    clock.now += 3600  # stopped for an hour
    assert not limit.over() and limit.spent == LONGEST_TICK
    for _ in range(3):
        clock.now += 1
        assert not limit.over()
    clock.now += 1
    assert limit.over()


def test_what_waits_for_too_long_is_told_once_and_progress_begins_anew():
    told, done = [], threading.Event()

    def too_late(waiting_for):
        told.append(waiting_for)
        done.set()

    with Watch(too_late) as watch:
        for _ in range(8):  # three times the limit in all, never the limit at once
            watch.expect("a peer", 1.0)
            time.sleep(0.4)
        assert not told
        watch.expect("the workers", 0.2)
        assert done.wait(30)
    assert told == ["the workers"]


def test_what_may_take_for_ever_is_waited_for():
    told = []
    with Watch(told.append) as watch:
        watch.expect("the GPU", None)
        time.sleep(1.2)
    assert not told
