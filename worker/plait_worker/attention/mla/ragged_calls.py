"""How decompressed prefill rows are grouped into calls: their new tokens, and chunks of their cached context.

A row is a prefill row, counted from the step's first; R rows of one call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from plait_worker.attention.mla.cached_context import ContextChunk, context_chunks


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive rows of one call."""

    rows: range
    tokens: slice
    """Their new tokens, among those of all prefill rows."""
    q_lengths: list[int]
    """``[R]``: new tokens."""
    seen: ContextChunk | None
    """The cached tokens that they see; None if they see their new tokens."""

    @property
    def kv_lengths(self) -> list[int]:
        """``[R]``: tokens that each sees, possibly 0."""
        return self.q_lengths if self.seen is None else self.seen.lengths.tolist()


def runs_of_new_tokens(lengths: Sequence[int], fits: Callable[[int, int], bool]) -> Iterator[Run]:
    """The rows in order over their new tokens, in calls as large as ``fits(num_rows, longest)`` allows.

    A call has at least one row, even if that does not fit.
    """
    first, longest = 0, 0
    for row, length in enumerate(lengths):
        if row > first and not fits(row + 1 - first, max(longest, length)):
            yield _run(lengths, range(first, row), None)
            first, longest = row, 0
        longest = max(longest, length)
    if lengths:
        yield _run(lengths, range(first, len(lengths)), None)


def runs_of_context(run: Run, starts: Sequence[int], lengths: Sequence[int], limit: int) -> Iterator[Run]:
    """The rows of ``run`` over their cached context, at most ``limit`` tokens a call.

    ``starts`` and ``lengths`` are of all prefill rows. A row of a call may have no context.
    """
    for chunk in context_chunks(starts[run.rows.start : run.rows.stop], limit):
        seen = replace(chunk, first=run.rows.start + chunk.first)
        yield _run(lengths, range(seen.rows.start, seen.rows.stop), seen)


def _run(lengths: Sequence[int], rows: range, seen: ContextChunk | None) -> Run:
    own = list(lengths[rows.start : rows.stop])
    first = sum(lengths[: rows.start])
    return Run(rows, slice(first, first + sum(own)), own, seen)
