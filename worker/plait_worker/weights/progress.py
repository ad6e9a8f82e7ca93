"""How far the weights are loaded: a bar on a terminal, a line of the log now and then elsewhere."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TextIO

_log = logging.getLogger(__name__)

_BAR_SECONDS, _LINE_SECONDS = 0.2, 5.0
"""Between two looks of each sort; a load that ends before the first shows nothing."""
_WIDTH = 30


class LoadingProgress:
    """Shown as tensors are taken."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        """The bar goes to ``stream`` if that is a terminal; ``clock`` gives seconds."""
        self._stream = stream
        self._clock = clock
        self._pause = _BAR_SECONDS if stream.isatty() else _LINE_SECONDS
        self._next = clock() + self._pause
        self._is_drawn = False

    def show(self, num_left: int, num_all: int) -> None:
        """So many bytes are still to be loaded."""
        is_due = self._clock() >= self._next
        if not is_due and not (self._is_drawn and num_left == 0):
            return
        self._next = self._clock() + self._pause
        share = 1 - num_left / num_all
        if self._stream.isatty():
            self._draw(share, num_all, is_last=num_left == 0)
        else:
            _log.info("weights: %.0f%% of %.1f GiB", share * 100, num_all / 2**30)

    def _draw(self, share: float, num_all: int, *, is_last: bool) -> None:
        bar = ("#" * round(share * _WIDTH)).ljust(_WIDTH, ".")
        end = "\n" if is_last else ""
        self._stream.write(f"\rweights [{bar}] {share:4.0%} of {num_all / 2**30:.1f} GiB{end}")
        self._stream.flush()
        self._is_drawn = not is_last
