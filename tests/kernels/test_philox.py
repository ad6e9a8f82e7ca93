"""The random numbers are those that Random123 publishes, and one per (seed, output token)."""

from __future__ import annotations

import torch
from plait_kernels.sampling import philox4x32, uniform

# Random123, tests/kat_vectors: counter, key, result.
PUBLISHED = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(column: int) -> torch.Tensor:
    return torch.tensor([[int(word, 16) for word in vector[column].split()] for vector in PUBLISHED])


def test_philox_gives_the_published_answers() -> None:
    assert philox4x32(words(0), words(1)).tolist() == words(2).tolist()


def test_all_64_bits_of_a_seed_count_as_unsigned() -> None:
    seeds = torch.tensor([1, 1 | 1 << 32, 1 | 1 << 63 - 1, -1, -2])
    drawn = uniform(seeds, torch.zeros(5, dtype=torch.int64))
    assert len(set(drawn.tolist())) == 5
    word_0, word_1 = 0x6627E8D5, 0xE169C58D
    expected = ((word_0 >> 5) * 2**26 + (word_1 >> 6)) / 2**53
    assert uniform(torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)).item() == expected


def test_a_number_depends_on_its_own_seed_and_index_only() -> None:
    seeds, indices = torch.arange(50) * 7919, torch.arange(50) * 3
    together = uniform(seeds, indices)
    alone = torch.cat([uniform(seeds[i : i + 1], indices[i : i + 1]) for i in range(50)])
    assert torch.equal(together, alone)


def test_numbers_fill_the_unit_interval_evenly() -> None:
    drawn = uniform(torch.full((100_000,), 42), torch.arange(100_000))
    assert drawn.min() >= 0
    assert drawn.max() < 1
    counts = torch.histc(drawn.float(), bins=100, min=0, max=1)
    chi_square = ((counts - 1000) ** 2 / 1000).sum().item()
    assert 60 < chi_square < 150  # 99 degrees of freedom
