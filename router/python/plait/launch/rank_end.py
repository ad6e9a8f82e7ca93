"""What the end of a rank's process means: an exit code of ours, or a library that found no memory."""

from __future__ import annotations

import re
import signal
from collections import deque

from plait_proto import ExitCode

_NO_MEMORY = re.compile(
    r"bad_alloc|out of memory|cannot allocate memory|can't allocate memory|MemoryError|failed to map segment",
    re.IGNORECASE,
)
_OWN_SIGNALS = (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS)
"""Those that a process brings on itself."""
_NUM_LINES = 20
_MAX_LINE = 4096


class LastLines:
    """The last of what a rank said on standard error."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=_NUM_LINES)

    def add(self, line: str) -> None:
        """Blank ones do not count."""
        if line.strip():
            self._lines.append(line.strip()[:_MAX_LINE])

    @property
    def last(self) -> str:
        """Empty if it said nothing."""
        return self._lines[-1] if self._lines else ""

    @property
    def no_memory(self) -> str | None:
        """The last line that says so."""
        return next((line for line in reversed(self._lines) if _NO_MEMORY.search(line)), None)


def exit_code_of(code: int, lines: LastLines) -> int:
    """The code of a rank's end, negative for a signal.

    A library without memory aborts, and the loader exits with a code of its own: both mean `HARDWARE` if they said so.
    """
    if code in (0, *ExitCode):
        return code
    if lines.no_memory is not None and (code > 0 or -code in _OWN_SIGNALS):
        return int(ExitCode.HARDWARE)
    return code if code < 0 else int(ExitCode.RANK_LOST)


def reason_of(code: int, lines: LastLines) -> str:
    """How a rank ended, after its name: what it said of memory, the signal, or its exit code."""
    if exit_code_of(code, lines) != code and (line := lines.no_memory) is not None:
        return f"is out of memory: {line}"
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"
