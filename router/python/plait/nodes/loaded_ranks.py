"""Which ranks have their weights, by the line that each says: where the load ends and the capture begins."""

from __future__ import annotations

import re

from plait.nodes.layout import Layout
from plait.nodes.log_lines import Line

_WEIGHTS = re.compile(r"\S+ \S+ INFO weights: ")


class LoadedRanks:
    """None with a --log-level over info: the whole start is the load then."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._ranks: set[int] = set()

    def note(self, line: Line) -> None:
        """A line of the log."""
        if line.source.rank is not None and _WEIGHTS.match(line.text):
            self._ranks.add(line.source.rank)

    def missing(self) -> list[int]:
        """Nodes with ranks that have none yet."""
        return sorted({one.node for one in self._layout.ranks() if one.rank not in self._ranks})
