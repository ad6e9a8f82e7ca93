"""Which prefill rows of latent attention are better absorbed, as decode rows are.

Absorbed, a pair of a new token and one that it sees costs some 0.27 ns a layer on an H200 with up to 64 heads, hardly
less in other rows' company. Otherwise it costs a twelfth; but every cached token gets keys and values first.
"""

from __future__ import annotations

from collections.abc import Sequence

from plait_worker.graph_sizes import Size

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


def best_captured(roomy: Sequence[Size], starts: Sequence[int], lengths: Sequence[int]) -> Size | None:
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
