"""A bound on how long a library's call takes that looks for signals, as ``re`` does, but knows no bound itself."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn


class TimeLimit:
    """So many seconds in all, in the main thread; calls in other threads are not bounded."""

    def __init__(self, seconds: float, error: Exception) -> None:
        """``error`` is raised where a call goes beyond it."""
        self._left = seconds
        self._error = error

    @contextmanager
    def held(self) -> Iterator[None]:
        """For the calls inside."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        began, handler = time.monotonic(), signal.signal(signal.SIGALRM, self._end)
        others, _ = signal.setitimer(signal.ITIMER_REAL, max(self._left, 1e-3))
        try:
            yield
        finally:
            taken = time.monotonic() - began
            self._left -= taken
            signal.setitimer(signal.ITIMER_REAL, max(others - taken, 1e-3) if others else 0.0)
            signal.signal(signal.SIGALRM, handler)

    def _end(self, _signal: int, _frame: FrameType | None) -> NoReturn:
        raise self._error
