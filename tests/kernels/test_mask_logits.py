"""A mask leaves a row the tokens whose bits are set, and no others."""

from __future__ import annotations

import pytest
import torch
from plait_kernels.sampling import mask_logits, sample_greedy
from plait_kernels.sampling.adjust import NOT_ALLOWED


def some_masks(vocab: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Three masks as words and as bools: a few tokens, all, and none but the last."""
    drawn = torch.Generator().manual_seed(vocab)
    allowed_MV = torch.rand((3, vocab), generator=drawn) < 0.2
    allowed_MV[1] = True
    allowed_MV[2] = torch.arange(vocab) == vocab - 1
    words_MW = torch.zeros((3, -(-vocab // 32)), dtype=torch.int64)
    for mask, token in allowed_MV.nonzero().tolist():
        words_MW[mask, token // 32] |= 1 << (token % 32)
    return torch.where(words_MW >= 2**31, words_MW - 2**32, words_MW).to(torch.int32), allowed_MV


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [1, 31, 32, 264, 1001])
def test_tokens_outside_of_the_rows_mask_are_not_allowed(vocab: int, dtype: torch.dtype) -> None:
    logits_SV = torch.randn(4, vocab).to(dtype)
    words_MW, allowed_MV = some_masks(vocab)
    mask_S = torch.tensor([2, 0, 1, 2])
    masked_SV = mask_logits(logits_SV, words_MW, mask_S)
    expected = torch.where(allowed_MV[mask_S], logits_SV, torch.tensor(NOT_ALLOWED, dtype=dtype))
    assert masked_SV.dtype == dtype
    assert torch.equal(masked_SV, expected)
    assert masked_SV.data_ptr() != logits_SV.data_ptr(), "log-probabilities are those of the logits before"


def test_a_mask_of_one_token_forces_it() -> None:
    words_MW, _ = some_masks(300)
    assert sample_greedy(mask_logits(torch.randn(1, 300), words_MW, torch.tensor([2]))).tolist() == [299]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("vocab", [1, 264, 1001, 151_936])
def test_the_kernel_masks_as_the_reference_does(vocab: int, dtype: torch.dtype) -> None:
    logits_SV = torch.randn(4, vocab).to(dtype)
    words_MW, mask_S = torch.randint(-(2**31), 2**31, (3, -(-vocab // 32))).to(torch.int32), torch.tensor([2, 0, 1, 2])
    given = mask_logits(logits_SV.cuda(), words_MW.cuda(), mask_S.cuda())
    assert torch.equal(given.cpu(), mask_logits(logits_SV, words_MW, mask_S))
