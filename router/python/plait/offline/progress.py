"""A line on a terminal that says how far a list of requests is."""

from __future__ import annotations

import sys
import time
from typing import TextIO

BAR_CHARACTERS = 30
DRAW_SECONDS = 0.1


class Progress:
    """Draws on standard error if that is a terminal, else nothing."""

    def __init__(self, total: int, num_done: int = 0, *, is_shown: bool = True, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._is_shown = is_shown and self._stream.isatty()
        self._total, self._num_done, self._num_before = total, num_done, num_done
        self._started_at = time.monotonic()
        self._drawn_at = 0.0

    def __enter__(self) -> Progress:
        self._draw()
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_shown:
            self._draw()
            print(file=self._stream, flush=True)

    def advance(self) -> None:
        """One more is done."""
        self._num_done += 1
        if time.monotonic() - self._drawn_at >= DRAW_SECONDS:
            self._draw()

    def _draw(self) -> None:
        if not self._is_shown:
            return
        self._drawn_at = time.monotonic()
        seconds = self._drawn_at - self._started_at
        rate = (self._num_done - self._num_before) / seconds if seconds > 0 else 0.0
        num_filled = BAR_CHARACTERS * self._num_done // max(1, self._total)
        bar = "#" * num_filled + "-" * (BAR_CHARACTERS - num_filled)
        line = f"\r[{bar}] {self._num_done:,} of {self._total:,} requests, {rate:.1f} a second"
        print(line, end="\033[K", file=self._stream, flush=True)
