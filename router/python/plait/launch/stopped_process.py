"""Processes of ranks that are stopped, by SIGSTOP or a debugger."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

STOPPED_SECONDS = 2.0
"""A rank for which others wait is lost once it is stopped so long."""
LOOK_SECONDS = 0.1
"""Between two looks."""
REASON = f"was stopped (SIGSTOP, or a debugger) for {STOPPED_SECONDS:g} s"


def is_stopped(pid: int) -> bool:
    """False too for a process that is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] in ("T", "t")


class StoppedLooks:
    """Counts, for each rank, looks in a row that found its process stopped.

    Not seconds: a pause of this process was one of its ranks too.
    """

    def __init__(self) -> None:
        self._num_looks: Counter[int] = Counter()

    def add(self, rank: int, *, is_stopped: bool) -> bool:
        """A look at a rank, every `LOOK_SECONDS`; whether it has been stopped for long. Counts from the start then."""
        self._num_looks[rank] = self._num_looks[rank] + 1 if is_stopped else 0
        if self._num_looks[rank] * LOOK_SECONDS < STOPPED_SECONDS:
            return False
        self._num_looks[rank] = 0
        return True
