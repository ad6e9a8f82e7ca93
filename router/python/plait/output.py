"""Output that does not fail or block when its reader is gone or slow."""

from __future__ import annotations

import contextlib
import os
import select
import sys
from typing import TextIO


def discard_output(stream: TextIO | None = None) -> None:
    """Send ``stream`` (default: standard output) to /dev/null once nothing can be written, as after ``| head``.

    What is flushed at exit is discarded too.
    """
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, (stream or sys.stdout).fileno())
    os.close(nowhere)


def say(line: str, stream: TextIO | None = None) -> None:
    """Write and flush a line, to standard output by default. Does not fail if the reader is gone or the disk full."""
    try:
        print(line, file=stream, flush=True)
    except OSError:
        discard_output(stream)


def stderr_fd() -> int:
    """The descriptor of standard error; 2 where Python's has none, as in a notebook."""
    try:
        return sys.stderr.fileno()
    except (AttributeError, OSError, ValueError):
        return 2


def forward_to_stderr(text: bytes) -> None:
    """Write to standard error what its reader takes at once, and drop the rest: a log must not block the server."""
    stderr = stderr_fd()
    writable = select.poll()
    writable.register(stderr, select.POLLOUT)
    # A pipe that poll reports writable takes PIPE_BUF bytes without blocking.
    pieces = (text[begin : begin + select.PIPE_BUF] for begin in range(0, len(text), select.PIPE_BUF))
    with contextlib.suppress(OSError):
        for piece in pieces:
            if writable.poll(0) != [(stderr, select.POLLOUT)]:
                return
            os.write(stderr, piece)
