"""Philox4x32-10: random numbers as a pure function of a key and a counter.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
Shapes: N random numbers. torch has no unsigned arithmetic, so every 32-bit word lives in an int64.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_NUM_ROUNDS = 10
_WORD = 0xFFFFFFFF


def philox4x32(counter_N4: Tensor, key_N2: Tensor) -> Tensor:
    """The block of four words that each counter gives under its key.

    ``counter_N4`` and ``key_N2`` are int64 with values below 2**32; so is the result, of shape ``[N, 4]``.
    """
    counter_0, counter_1, counter_2, counter_3 = counter_N4.unbind(-1)
    key_0, key_1 = key_N2.unbind(-1)
    for _ in range(_NUM_ROUNDS):
        high_0, low_0 = _mulhilo32(counter_0, _MULTIPLIERS[0])
        high_1, low_1 = _mulhilo32(counter_2, _MULTIPLIERS[1])
        counter_0, counter_1, counter_2, counter_3 = (
            high_1 ^ counter_1 ^ key_0,
            low_1,
            high_0 ^ counter_3 ^ key_1,
            low_0,
        )
        key_0, key_1 = (key_0 + _WEYL[0]) & _WORD, (key_1 + _WEYL[1]) & _WORD
    return torch.stack((counter_0, counter_1, counter_2, counter_3), dim=-1)


def uniform(seed_N: Tensor, index_N: Tensor) -> Tensor:
    """One number in [0, 1) for output token ``index_N`` of a request seeded with ``seed_N``.

    Both are int64; a seed is 64 bits, read as unsigned. Returns float64 ``[N]`` on a grid of 2**-53. The words are
    integers, so every device gives the same number.
    """
    zero_N = torch.zeros_like(index_N)
    counter_N4 = torch.stack((index_N & _WORD, (index_N >> 32) & _WORD, zero_N, zero_N), dim=-1)
    key_N2 = torch.stack((seed_N & _WORD, (seed_N >> 32) & _WORD), dim=-1)
    words_N4 = philox4x32(counter_N4, key_N2)
    bits_N = ((words_N4[:, 0] >> 5) << 26) | (words_N4[:, 1] >> 6)
    return bits_N.to(torch.float64) * 2.0**-53


def _mulhilo32(word_N: Tensor, multiplier: int) -> tuple[Tensor, Tensor]:
    # int64 wraps around, but the 64 bits are those of the unsigned result.
    wide_N = word_N * multiplier
    return (wide_N >> 32) & _WORD, wide_N & _WORD
