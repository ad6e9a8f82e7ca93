"""The order of work of un-absorbed prefill: which rows attend in one call, and which cached tokens go together.

A row is a prefill row of the step, counted from the first of them; R rows of one call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from plait_worker.attention.context_pieces import context_pieces


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive rows of one call."""

    rows: range
    tokens: slice
    """Their new tokens among those of all prefill rows."""
    q_lengths: list[int]
    """``[R]``: new tokens."""
    begins: list[int]
    """``[R]``: the position of the first token that each sees here."""
    kv_lengths: list[int]
    """``[R]``: how many tokens each sees here; 0 is none."""

    @property
    def num_seen(self) -> int:
        """Tokens seen, of all rows."""
        return sum(self.kv_lengths)


def runs_of_new_tokens(lengths: Sequence[int], fits: Callable[[int, int], bool]) -> Iterator[Run]:
    """The rows in order, each seeing its own new tokens, in calls as large as ``fits(rows, longest)`` allows.

    One row always goes alone.
    """
    first, longest = 0, 0
    for row, length in enumerate(lengths):
        if row > first and not fits(row + 1 - first, max(longest, length)):
            yield _of_new_tokens(lengths, range(first, row))
            first, longest = row, 0
        longest = max(longest, length)
    if lengths:
        yield _of_new_tokens(lengths, range(first, len(lengths)))


def _of_new_tokens(lengths: Sequence[int], rows: range) -> Run:
    own = list(lengths[rows.start : rows.stop])
    return Run(rows, _tokens(lengths, rows), own, [0] * len(rows), own)


def runs_of_context(run: Run, starts: Sequence[int], lengths: Sequence[int], chunk: int) -> Iterator[Run]:
    """What the rows of ``run`` cached before this step, at most ``chunk`` tokens a call.

    ``starts`` and ``lengths`` are of all prefill rows. A row between others that see something may see nothing.
    """
    for piece in context_pieces(starts[run.rows.start : run.rows.stop], chunk):
        first = run.rows.start + piece.first
        rows = range(first, first + len(piece.lengths))
        own = list(lengths[rows.start : rows.stop])
        yield Run(rows, _tokens(lengths, rows), own, piece.begins.tolist(), piece.lengths.tolist())


def _tokens(lengths: Sequence[int], rows: range) -> slice:
    first = sum(lengths[: rows.start])
    return slice(first, first + sum(lengths[rows.start : rows.stop]))
