"""Which prefill rows of latent attention are better absorbed, as decode rows are.

Absorbed, a pair of a new token and one that it sees costs some 0.27 ns a layer on an H200 with up to 64 heads, hardly
less in other rows' company. Otherwise it costs a twelfth; but every cached token gets keys and values first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
from torch import Tensor

from plait_worker.graph_sizes import Size
from plait_worker.rows import Rows
from plait_worker.transfer import upload

_FREE_PAIRS = 1 << 16
"""What the launches of the other way cost beside their work."""
_PAIRS_PER_CACHED_TOKEN = 32
"""What keys and values for one cached token cost."""
_CAPTURED_PAIRS = 1 << 20
"""What the host's launches of a whole step cost, which a captured step saves: 0.3 ms a layer."""


def is_short(starts: Sequence[int], lengths: Sequence[int]) -> bool:
    """Whether prefill rows take less of the device's time absorbed."""
    return _pairs(starts, lengths) <= _FREE_PAIRS + _PAIRS_PER_CACHED_TOKEN * sum(starts)


def is_short_beside_others(start: int, length: int) -> bool:
    """Whether that goes for one of several rows, where the other way is launched anyhow."""
    return _pairs([start], [length]) <= _PAIRS_PER_CACHED_TOKEN * start


def best_captured_size(roomy: Sequence[Size], starts: Sequence[int], lengths: Sequence[int]) -> Size | None:
    """Of captured steps with room, smallest first, the best for these prefill rows; None where none of them is good.

    Those whose prompts are not planned absorb them: where no other has room, still better than to launch a step
    operation by operation.
    """
    absorbed = next((size for size in roomy if size.context_tokens is None), None)
    planned = next((size for size in roomy if size.context_tokens is not None), None)
    if planned is None:
        return absorbed if _pairs(starts, lengths) <= _CAPTURED_PAIRS else None
    return absorbed if absorbed is not None and is_short(starts, lengths) else planned


def _pairs(starts: Sequence[int], lengths: Sequence[int]) -> int:
    """Of new tokens with those that they see."""
    return sum(n * start + n * (n + 1) // 2 for start, n in zip(starts, lengths, strict=True))


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
