"""Penalties, biases and allowed tokens agree with a float64 computation, in the reference and in the CPU kernel."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from plait_kernels.sampling import Adjustments, adjust, adjust_logits

Floats = NDArray[np.float64]
KERNELS: dict[str, Callable[[torch.Tensor, Adjustments], torch.Tensor]] = {
    "reference": adjust.adjust_logits,
    "kernel": adjust_logits,
}
PENALTIES = [(0.0, 0.0, 1.0), (0.7, 0.0, 1.0), (0.0, -0.3, 1.0), (0.0, 0.0, 1.3), (-2.0, 2.0, 0.5)]
ROWS = 5


def some_changes(vocab: int, num_listed: int, seed: int = 0) -> Adjustments:
    """Each row with other penalties, the third with listed tokens only; the counts of another order."""
    drawn = torch.Generator().manual_seed(seed)
    counts = torch.randint(0, 7, (ROWS + 2, vocab), generator=drawn, dtype=torch.int32)
    counts *= torch.rand(counts.shape, generator=drawn) < 0.3
    listed = [torch.randperm(vocab, generator=drawn)[: num_listed * row] for row in range(ROWS)]
    return Adjustments(
        counts_RV=counts,
        rows_S=torch.randperm(ROWS + 2, generator=drawn)[:ROWS],
        penalties_S3=torch.tensor(PENALTIES),
        ends_S=torch.tensor([len(ids) for ids in listed]).cumsum(0),
        ids_E=torch.cat(listed),
        bias_E=torch.cat([torch.rand(len(ids), generator=drawn) * 200 - 100 for ids in listed]),
        only_listed_S=torch.arange(ROWS) == 2,
    )


def oracle(logits: Floats, changes: Adjustments, row: int) -> Floats:
    """One row in float64, token by token as vLLM's documentation says it."""
    presence, frequency, repetition = (float(value) for value in changes.penalties_S3[row])
    counts = changes.counts_RV[changes.rows_S[row]].numpy()
    adjusted = logits.copy()
    seen = counts != 0
    adjusted[seen] = np.where(logits[seen] > 0, logits[seen] / repetition, logits[seen] * repetition)
    adjusted -= frequency * (counts >> 1) + presence * (counts >= 2)
    ends = [0, *changes.ends_S.tolist()]
    ids = changes.ids_E[ends[row] : ends[row + 1]].numpy()
    biased = adjusted[ids] + changes.bias_E[ends[row] : ends[row + 1]].double().numpy()
    if changes.only_listed_S[row]:
        adjusted[:] = adjust.NOT_ALLOWED
    adjusted[ids] = biased
    return adjusted


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("vocab", "num_listed"), [(17, 0), (264, 3), (100_003, 256)])
def test_changes_are_those_of_float64(kernel: str, vocab: int, num_listed: int) -> None:
    logits = torch.randn(ROWS, vocab, generator=torch.Generator().manual_seed(vocab)) * 8
    changes = some_changes(vocab, num_listed)
    given = KERNELS[kernel](logits, changes)
    for row in range(ROWS):
        expected = torch.from_numpy(oracle(logits[row].double().numpy(), changes, row))
        assert torch.allclose(given[row].double(), expected, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("kernel", KERNELS)
def test_tokens_that_were_not_seen_keep_their_bits(kernel: str) -> None:
    logits = torch.randn(ROWS, 300)
    changes = some_changes(300, 0)
    given = KERNELS[kernel](logits, changes)
    untouched = (changes.counts_RV[changes.rows_S] == 0) & ~changes.only_listed_S[:, None]
    assert torch.equal(given[untouched], logits[untouched])
    assert given.data_ptr() != logits.data_ptr()


@pytest.mark.parametrize("kernel", KERNELS)
def test_no_penalty_takes_a_token_below_the_closed_ones(kernel: str) -> None:
    changes = some_changes(300, 0)
    changes.counts_RV.fill_(2_000_000_000)
    changes.penalties_S3[:] = torch.tensor([2.0, 2.0, 1.0])
    assert KERNELS[kernel](torch.zeros(ROWS, 300), changes)[0].min() > adjust.CLOSED


@pytest.mark.parametrize("kernel", KERNELS)
def test_logits_that_are_no_numbers_stay_so(kernel: str) -> None:
    """A damaged model is found, whatever its requests ask for."""
    changes = some_changes(300, 0)
    changes.counts_RV.fill_(2)
    given = KERNELS[kernel](torch.full((ROWS, 300), torch.nan), changes)
    assert given[0].isnan().all()


def test_16_bits_are_rounded_once() -> None:
    logits = (torch.randn(ROWS, 264) * 8).bfloat16()
    changes = some_changes(264, 3)
    given = adjust_logits(logits, changes)
    assert given.dtype == torch.bfloat16
    assert torch.equal(given, adjust.adjust_logits(logits.float(), changes).bfloat16())
