"""Prefill rows in another order than the plan's, for latent attention: those that are absorbed stand behind the others.

Shapes: T tokens of the step, R its rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
from torch import Tensor

from plait_worker.rows import Rows
from plait_worker.transfer import upload

IsShort = Callable[[int, int], bool]
"""Whether a row with this start and so many new tokens is absorbed."""


@dataclasses.dataclass(frozen=True, slots=True)
class OrderedRows:
    """A step whose first ``num_long`` rows are not absorbed, and all others are."""

    rows: Rows
    """Fit for attention alone: tokens and samples are the plan's."""
    num_long: int
    order_T: Tensor | None
    """int64: which token of the plan's step stands at each place; None where each stands at its own."""

    @property
    def num_long_tokens(self) -> int:
        """Tokens of the first rows."""
        return sum(self.rows.lengths[: self.num_long])


def short_last(rows: Rows, is_short: IsShort) -> OrderedRows:
    """The step's prefill rows, the long ones first, then its decode rows."""
    prefill = range(rows.num_prefill)
    long = [row for row in prefill if not is_short(rows.starts[row], rows.lengths[row])]
    if long == list(range(len(long))):
        return OrderedRows(rows, len(long), None)
    is_long = set(long)
    order = [*long, *(row for row in prefill if row not in is_long), *range(rows.num_prefill, rows.num_rows)]
    ends_R = np.cumsum(rows.lengths)
    tokens = np.concatenate([np.arange(ends_R[row] - rows.lengths[row], ends_R[row]) for row in order])
    order_T, order_R = (upload(values, rows.positions_T.device) for values in (tokens, np.array(order)))
    ordered = dataclasses.replace(
        rows,
        slots=[rows.slots[row] for row in order],
        starts=[rows.starts[row] for row in order],
        lengths=[rows.lengths[row] for row in order],
        positions_T=rows.positions_T[order_T],
        page_table_RW=rows.page_table_RW[order_R],
    )
    return OrderedRows(ordered, len(long), order_T)
