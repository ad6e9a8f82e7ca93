"""Which prefill rows of latent attention are better absorbed, as decode rows are."""

from __future__ import annotations

from collections.abc import Sequence

_FREE_PAIRS = 1 << 16
_PAIRS_PER_CACHED_TOKEN = 32
"""Pairs of query and cached token that cost, absorbed, what keys and values for one cached token do."""


def is_short(starts: Sequence[int], lengths: Sequence[int]) -> bool:
    """Whether prefill rows take less time absorbed: few pairs of a new token with those before it."""
    pairs = sum(length * (start + length) for start, length in zip(starts, lengths, strict=True))
    return pairs <= _FREE_PAIRS + _PAIRS_PER_CACHED_TOKEN * sum(starts)
