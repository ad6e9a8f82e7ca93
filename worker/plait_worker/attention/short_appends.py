"""Which prefill rows of latent attention are better absorbed, as decode rows are.

Absorbed, a pair of a new token and one that it sees costs some 0.27 ns a layer on an H200 with up to 64 heads, hardly
less in other rows' company. Otherwise it costs a twelfth; but every cached token gets keys and values first.
"""

from __future__ import annotations

from collections.abc import Sequence

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


def fits_graph(starts: Sequence[int], lengths: Sequence[int]) -> bool:
    """Whether absorbing prefill rows, which a captured step must, is better than launching one operation by one."""
    return _pairs(starts, lengths) <= _CAPTURED_PAIRS


def _pairs(starts: Sequence[int], lengths: Sequence[int]) -> int:
    """Of new tokens with those that they see."""
    return sum(n * start + n * (n + 1) // 2 for start, n in zip(starts, lengths, strict=True))
