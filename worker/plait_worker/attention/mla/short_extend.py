"""Which MLA prefill rows are short extends, which are absorbed as decode rows are.

Absorbed, a pair of a new token and one that it sees costs some 0.27 ns a layer on an H200 with up to 64 heads, hardly
less beside other rows. Decompressed it costs a twelfth, but first every cached token is up-projected.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
from torch import Tensor

from plait_worker.graph_sizes import PLANNED_TILES, TILE, GraphSize
from plait_worker.rows import Rows
from plait_worker.transfer import upload

_FREE_PAIRS = 1 << 16
"""Cost of the decompressed way's launches, in absorbed pairs."""
_PAIRS_PER_CACHED_TOKEN = 32
"""Cost of up-projecting a cached token."""
_CAPTURED_PAIRS = 1 << 20
"""Cost of launching a step kernel by kernel, which a graph saves: 0.3 ms a layer."""


def are_short_extends(starts: Sequence[int], lengths: Sequence[int]) -> bool:
    """Whether these prefill rows are faster absorbed."""
    return _pairs(starts, lengths) <= _FREE_PAIRS + _PAIRS_PER_CACHED_TOKEN * sum(starts)


def is_short_extend(start: int, length: int) -> bool:
    """Whether one of several rows is, if the others are decompressed anyway."""
    return _pairs([start], [length]) <= _PAIRS_PER_CACHED_TOKEN * start


def best_captured_size(fitting: Sequence[GraphSize], starts: Sequence[int], lengths: Sequence[int]) -> GraphSize | None:
    """The best graph for these prefill rows, of those that fit, smallest first; None if launching is faster.

    Graphs without a plan absorb all rows. If no planned one fits, that can still be faster than launching.
    """
    absorbed = next((size for size in fitting if size.context_tokens is None), None)
    planned = next((size for size in fitting if size.context_tokens is not None), None)
    if planned is not None and _is_wasteful(planned, sum(lengths)):
        planned = None
    if planned is None:
        return absorbed if _pairs(starts, lengths) <= _CAPTURED_PAIRS else None
    return absorbed if absorbed is not None and are_short_extends(starts, lengths) else planned


def _is_wasteful(size: GraphSize, num_tokens: int) -> bool:
    """Whether a graph of many tokens has a third more than the step: launching the step takes less."""
    return size.prompt_tokens > PLANNED_TILES[-1] * TILE and 3 * size.prompt_tokens > 4 * num_tokens


def _pairs(starts: Sequence[int], lengths: Sequence[int]) -> int:
    """Pairs of a new token and one that it sees."""
    return sum(n * start + n * (n + 1) // 2 for start, n in zip(starts, lengths, strict=True))


IsShortExtend = Callable[[int, int], bool]
"""By start and number of new tokens: whether the row is absorbed."""


@dataclasses.dataclass(frozen=True, slots=True)
class OrderedRows:
    """A step whose first ``num_decompressed`` rows are decompressed; all others are absorbed."""

    rows: Rows
    """For attention only: tokens and samples keep the plan's order."""
    num_decompressed: int
    order_T: Tensor | None
    """int64: the plan's token at each index; None if the order is the plan's."""

    @property
    def num_decompressed_tokens(self) -> int:
        """Tokens of the decompressed rows."""
        return sum(self.rows.lengths[: self.num_decompressed])


def short_extends_last(rows: Rows, is_short: IsShortExtend) -> OrderedRows:
    """The step's rows: decompressed prefill rows, then short extends, then decode rows."""
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
