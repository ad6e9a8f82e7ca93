"""Requests to stop: signals, and the end of a connection that the launcher was started through."""

from __future__ import annotations

import asyncio
import signal


class StopRequests:
    """How often somebody asked: once to drain, twice to stop at once."""

    def __init__(self) -> None:
        self.num_signals = 0

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """SIGHUP comes when a terminal or an ssh connection is lost: nobody is there to ask a second time."""
        loop.add_signal_handler(signal.SIGINT, self._add, 1)
        loop.add_signal_handler(signal.SIGTERM, self._add, 1)
        loop.add_signal_handler(signal.SIGHUP, self._add, 2)

    def _add(self, count: int) -> None:
        self.num_signals += count
