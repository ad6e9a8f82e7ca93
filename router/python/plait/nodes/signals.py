"""Requests to stop: signals, and the end of a connection that the launcher was started through."""

from __future__ import annotations

import asyncio
import os
import signal

from plait.errors import SettingsError

SIGN_OF_LIFE = b"."
SILENCE_SECONDS = 15.0
"""A connection that is cut without a word stays open at this end: whoever began to send signs of life goes on."""


class StopRequests:
    """How often somebody asked: once to drain, twice to stop at once."""

    def __init__(self) -> None:
        self.num_signals = 0
        self._silence: asyncio.TimerHandle | None = None

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """SIGHUP comes when a terminal or an ssh connection is lost: nobody is there to ask a second time."""
        loop.add_signal_handler(signal.SIGINT, self._add, 1)
        loop.add_signal_handler(signal.SIGTERM, self._add, 1)
        loop.add_signal_handler(signal.SIGHUP, self._add, 2)

    def _add(self, count: int) -> None:
        self.num_signals += count

    def attach_stdin(self, loop: asyncio.AbstractEventLoop, stdin: int) -> None:
        """Take a line for a request, and the end, or silence behind a sign of life, for two.

        Raises `SettingsError` for what is no pipe or terminal.
        """
        try:
            loop.add_reader(stdin, self._read, loop, stdin)
        except OSError as error:
            raise SettingsError(
                f"--stop-with-stdin waits on standard input, which is no pipe, socket or terminal: {error.strerror}"
            ) from error

    def _read(self, loop: asyncio.AbstractEventLoop, stdin: int) -> None:
        text = os.read(stdin, 4096)
        if not text:
            loop.remove_reader(stdin)
        if SIGN_OF_LIFE in text:
            self._wait_for_signs(loop)
        self._add(text.count(b"\n") if text else 2)

    def _wait_for_signs(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._silence is not None:
            self._silence.cancel()
        self._silence = loop.call_later(SILENCE_SECONDS, self._add, 2)
