"""Standard output and standard error whose reader is gone, or reads no more."""

from __future__ import annotations

import contextlib
import os
import select
import sys
from typing import TextIO


def discard_output(stream: TextIO | None = None) -> None:
    """Nobody reads any more (`| head`): what is still printed, and what is flushed at the exit, goes nowhere.

    ``stream`` is standard output by default.
    """
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, (stream or sys.stdout).fileno())
    os.close(nowhere)


def say(line: str, stream: TextIO | None = None) -> None:
    """Write a line at once, to standard output by default. All goes on when whoever read it is gone."""
    try:
        print(line, file=stream, flush=True)
    except BrokenPipeError:
        discard_output(stream)


def forward_to_stderr(text: bytes) -> None:
    """Write to standard error what its reader takes at once, and drop the rest: a server waits for nobody's log."""
    stderr = sys.stderr.fileno()
    writable = select.poll()
    writable.register(stderr, select.POLLOUT)
    # A pipe that poll calls writable takes that much without waiting.
    pieces = (text[begin : begin + select.PIPE_BUF] for begin in range(0, len(text), select.PIPE_BUF))
    with contextlib.suppress(OSError):
        for piece in pieces:
            if writable.poll(0) != [(stderr, select.POLLOUT)]:
                return
            os.write(stderr, piece)
