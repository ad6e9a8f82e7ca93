"""A bound on seconds holds in the main thread, adds up, and leaves others' timers as they were."""

from __future__ import annotations

import re
import signal
import threading
import time

import pytest
from plait_proto.time_limit import TimeLimit

SLOW = re.compile("(a+)+!")
ENDLESS, SHORT = "a" * 60, "a" * 12


def test_a_call_that_goes_on_is_ended_with_the_error() -> None:
    limit, began = TimeLimit(0.1, LookupError("too slow")), time.monotonic()
    with pytest.raises(LookupError, match="too slow"), limit.held():
        SLOW.match(ENDLESS)
    assert time.monotonic() - began < 10
    with pytest.raises(LookupError), limit.held():
        SLOW.match(ENDLESS)


def test_a_timer_that_was_there_goes_on() -> None:
    rung = list[int]()
    handler = signal.signal(signal.SIGALRM, lambda *_: rung.append(1))
    others = signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        with TimeLimit(60, LookupError()).held():
            SLOW.match(SHORT)
        assert not rung
        deadline = time.monotonic() + 20
        while not rung and time.monotonic() < deadline:
            time.sleep(0.01)
    finally:
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, *others)
    assert rung == [1]


def test_another_thread_is_not_bounded() -> None:
    found = list[object]()

    def match() -> None:
        with TimeLimit(0, LookupError()).held():
            found.append(SLOW.match(SHORT))

    thread = threading.Thread(target=match)
    thread.start()
    thread.join()
    assert found == [None]
