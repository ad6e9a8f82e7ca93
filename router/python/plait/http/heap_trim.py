"""Gives back what large bodies leave of the heap.

glibc keeps freed memory that lies below a block in use: tens of megabytes after a burst of large bodies. To look for it
takes some 40 us, and to give it back 0.1 ms a megabyte, in which others wait. So it is done only some time after a
large body, which took longer to read.
"""

from __future__ import annotations

import asyncio
import ctypes
import time
from collections.abc import Callable

LARGE_BYTES = 1 << 20
SECONDS = 10.0
"""From a large body to the trim, which is once in so many seconds at most."""


class HeapTrim:
    """Calls `trim` after large bodies, on the loop that read them."""

    def __init__(self, trim: Callable[[], object], seconds: float = SECONDS) -> None:
        self._trim = trim
        self._seconds = seconds
        self._due = 0.0
        """When the next one comes, or the last one came."""
        self._is_asked_again = False

    def after_body(self, num_bytes: int) -> None:
        """A body of so many bytes was read, or given up; it may still be in use."""
        if num_bytes < LARGE_BYTES:
            return
        if time.monotonic() < self._due:
            self._is_asked_again = True
        else:
            self._begin()

    def _begin(self) -> None:
        self._is_asked_again = False
        self._due = time.monotonic() + self._seconds
        asyncio.get_running_loop().call_later(self._seconds, self._end)

    def _end(self) -> None:
        self._trim()
        if self._is_asked_again:
            self._begin()


def _trim_of_libc() -> Callable[[], object]:
    """glibc's; with another C library nothing is done."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return (lambda: trim(0)) if trim is not None else lambda: None


OF_BODIES = HeapTrim(_trim_of_libc())
"""The heap is the process's, and so is this."""
