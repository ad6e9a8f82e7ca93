"""Standard output and standard error whose reader is gone, or reads no more."""

from __future__ import annotations

import contextlib
import os
import select
import sys
from typing import TextIO


def drop_output(stream: TextIO | None = None) -> None:
    """Nobody reads any more (`| head`): what is still printed, and what is flushed at the exit, goes nowhere.

    ``stream`` is standard output by default.
    """
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, (stream or sys.stdout).fileno())
    os.close(nowhere)


def say_last(line: str) -> None:
    """Write a line to standard error, whether or not anybody reads it."""
    try:
        print(line, file=sys.stderr, flush=True)
    except BrokenPipeError:
        drop_output(sys.stderr)


def pass_on(text: bytes) -> None:
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
