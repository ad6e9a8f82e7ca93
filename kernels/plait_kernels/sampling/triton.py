"""Argmax of each row in Triton, in two launches: over blocks of a row, then over their results.

Shapes: S rows, V vocabulary, B blocks of a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from plait_kernels.pdl import pdl_launch, pdl_wait
from plait_kernels.sampling import reference

NO_TOKEN = tl.constexpr(reference.NO_TOKEN)
_BLOCK = 4096


def sample_greedy(logits_SV: Tensor) -> Tensor:
    """See ``plait_kernels.sampling.sample_greedy``; rows need not be adjacent."""
    num_rows, vocab = logits_SV.shape
    num_blocks = triton.cdiv(vocab, _BLOCK)
    best_SB = logits_SV.new_empty(num_rows, num_blocks, dtype=torch.float32)
    ids_SB = torch.empty(num_rows, num_blocks, dtype=torch.int64, device=logits_SV.device)
    ids_S = torch.empty(num_rows, dtype=torch.int64, device=logits_SV.device)
    if num_rows:
        early = pdl_launch(logits_SV)
        grid = (num_rows, num_blocks)
        _best_of_block_kernel[grid](logits_SV, best_SB, ids_SB, vocab, logits_SV.stride(0), BLOCK=_BLOCK, **early)
        _best_of_row_kernel[(num_rows,)](
            best_SB, ids_SB, ids_S, num_blocks, BLOCK=triton.next_power_of_2(num_blocks), **early
        )
    return ids_S


@triton.jit
def _best_of_block_kernel(logits_ptr, best_ptr, ids_ptr, vocab, row_stride, BLOCK: tl.constexpr, PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    pdl_wait(PDL)
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = block * BLOCK + tl.arange(0, BLOCK)
    logits = tl.load(logits_ptr + row * row_stride + token, mask=token < vocab, other=-float("inf")).to(tl.float32)
    # Comparisons would pass over NaN.
    logits = tl.where(logits == logits, logits, float("inf"))
    best, column = tl.max(logits, axis=0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(best_ptr + row * tl.num_programs(1) + block, best)
    tl.store(ids_ptr + row * tl.num_programs(1) + block, (block * BLOCK + column).to(tl.int64))


@triton.jit
def _best_of_row_kernel(best_ptr, ids_ptr, out_ptr, num_blocks, BLOCK: tl.constexpr, PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    pdl_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCK)
    best = tl.load(best_ptr + row * num_blocks + block, mask=block < num_blocks, other=-float("inf"))
    largest, column = tl.max(best, axis=0, return_indices=True, return_indices_tie_break_left=True)
    token = tl.load(ids_ptr + row * num_blocks + column)
    is_distribution = (largest > -float("inf")) & (largest < float("inf"))
    tl.store(out_ptr + row, tl.where(is_distribution, token, NO_TOKEN))
