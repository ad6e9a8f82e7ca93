"""What a server's start took, and what it left of the GPU's memory, read off its log."""

from __future__ import annotations

import re
from dataclasses import dataclass

READY_SECONDS = 30.0
"""Asked for with weights in the page cache; a cold Triton cache may take half as much again."""
_PHASE = re.compile(r"rank 0: (?:\d+ )?([A-Za-z -]+): ([\d.]+) s\b")
_MEMORY_LEFT = re.compile(r"rank 0: memory left: ([\d.]+) GB")


@dataclass(frozen=True, slots=True)
class Start:
    """One server's."""

    name: str
    seconds: float
    """From the command to ready."""
    log: str

    def rows(self) -> list[dict[str, object]]:
        """The whole, each phase, and the memory left, if the log has it."""
        return [
            self._row("ready", "seconds", round(self.seconds, 2), READY_SECONDS),
            *(self._row(f"ready, {phase}", "seconds", float(each)) for phase, each in _PHASE.findall(self.log)),
            *(self._row("memory_left", "GB", float(gigabytes)) for gigabytes in _MEMORY_LEFT.findall(self.log)),
        ]

    def _row(self, metric: str, unit: str, value: float, goal: float | None = None) -> dict[str, object]:
        return {"case": f"start of {self.name}", "metric": metric, "unit": unit, "value": value, "goal": goal}
