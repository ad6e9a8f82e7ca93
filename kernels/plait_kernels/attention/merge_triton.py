"""Joining attention over parts of a context in Triton: one head of one token a program.

Shapes: T tokens, H heads, D numbers in a value.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def merge(a_THD: Tensor, lse_a_TH: Tensor, b_THD: Tensor, lse_b_TH: Tensor) -> tuple[Tensor, Tensor]:
    """See ``plait_kernels.attention.merge``; contiguous."""
    num_tokens, num_heads, width = a_THD.shape
    out_THD = torch.empty(a_THD.shape, dtype=torch.float32, device=a_THD.device)
    lse_TH = torch.empty_like(lse_a_TH)
    if num_tokens:
        block = triton.next_power_of_2(width)
        pairs = (a_THD, lse_a_TH, b_THD, lse_b_TH, out_THD, lse_TH)
        _merge_pairs[(num_tokens * num_heads,)](*pairs, WIDTH=width, BLOCK=block, num_warps=1)
    return out_THD, lse_TH


@triton.jit
def _merge_pairs(  # type: ignore[no-untyped-def]
    a_ptr,
    lse_a_ptr,
    b_ptr,
    lse_b_ptr,
    out_ptr,
    lse_ptr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64)
    number = tl.arange(0, BLOCK)
    lse_a, lse_b = tl.load(lse_a_ptr + at), tl.load(lse_b_ptr + at)
    top = tl.maximum(lse_a, lse_b)
    # Of two empty parts the difference would be inf - inf.
    shift = tl.where(top == -float("inf"), 0.0, top)
    weight_a, weight_b = tl.exp2(lse_a - shift), tl.exp2(lse_b - shift)
    total = weight_a + weight_b
    is_there = number < WIDTH
    a = tl.load(a_ptr + at * WIDTH + number, mask=number < tl.where(weight_a > 0, WIDTH, 0), other=0.0).to(tl.float32)
    b = tl.load(b_ptr + at * WIDTH + number, mask=number < tl.where(weight_b > 0, WIDTH, 0), other=0.0).to(tl.float32)
    out = (a * weight_a + b * weight_b) / tl.where(total == 0, 1.0, total)
    tl.store(out_ptr + at * WIDTH + number, out, mask=is_there)
    tl.store(lse_ptr + at, shift + tl.log2(total))
