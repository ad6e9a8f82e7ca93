"""Cached context of a step's prefill rows in pieces of bounded size, each over neighbouring rows.

Shapes: I cached tokens of a piece, W pages in the widest row's table.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ContextPiece:
    """Some of the cached tokens of rows ``first .. first + len(lengths)``, row after row."""

    first: int
    """The first row."""
    begins: Ints
    """Position of each row's first cached token in the piece."""
    lengths: Ints
    """Cached tokens of each row, none for a row that caches nothing; their sum is I."""

    @property
    def rows(self) -> slice:
        """The piece's rows."""
        return slice(self.first, self.first + len(self.lengths))

    def index(self, table_width: int, page_size: int) -> tuple[Ints, Ints]:
        """``[I]`` each: where in the flat page tables ``[R W]`` a token's page is named, and its place in that page."""
        row_I = np.repeat(np.arange(len(self.lengths)), self.lengths)
        before = self.lengths.cumsum() - self.lengths
        position_I = np.arange(int(self.lengths.sum())) + np.repeat(self.begins - before, self.lengths)
        return (self.first + row_I) * table_width + position_I // page_size, position_I % page_size


def context_pieces(contexts: Sequence[int], limit: int) -> Iterator[ContextPiece]:
    """All cached tokens of rows with ``contexts`` tokens each, in order, at most ``limit`` a piece."""
    ends = np.cumsum(contexts)
    total = int(ends[-1]) if len(ends) else 0
    for begin in range(0, total, limit):
        end = min(begin + limit, total)
        first = int(np.searchsorted(ends, begin, side="right"))
        last = int(np.searchsorted(ends, end, side="left")) + 1
        starts = ends[first:last] - np.array(contexts[first:last])
        begins = np.maximum(begin - starts, 0)
        yield ContextPiece(first, begins, np.minimum(ends[first:last], end) - starts - begins)
