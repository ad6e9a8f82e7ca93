"""LSE merge of attention over parts of a context in Triton: a program takes some heads of some tokens.

Shapes: T tokens, H heads, D dims of a value.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_PAIRS = 8
"""Pairs of token and head of a program: in one warp each thread loads four elements at a time."""


def merge(a_THD: Tensor, lse_a_TH: Tensor, b_THD: Tensor, lse_b_TH: Tensor) -> tuple[Tensor, Tensor]:
    """See ``plait_kernels.attention.merge``; contiguous."""
    out_THD = torch.empty(a_THD.shape, dtype=torch.float32, device=a_THD.device)
    lse_TH = torch.empty_like(lse_a_TH)
    _launch((a_THD, lse_a_TH), (b_THD, lse_b_TH), (out_THD, lse_TH))
    return out_THD, lse_TH


def merge_into(combined_THD: Tensor, lse_TH: Tensor, part_THD: Tensor, lse_part_TH: Tensor) -> None:
    """See ``plait_kernels.attention.merge_into``; contiguous."""
    _launch((combined_THD, lse_TH), (part_THD, lse_part_TH), (combined_THD, lse_TH))


def _launch(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], out: tuple[Tensor, Tensor]) -> None:
    num_tokens, num_heads, width = a[0].shape
    num_pairs = num_tokens * num_heads
    if num_pairs:
        _merge_pairs_kernel[(triton.cdiv(num_pairs, _PAIRS),)](
            *a, *b, *out, num_pairs, WIDTH=width, BLOCK=triton.next_power_of_2(width), PAIRS=_PAIRS, num_warps=1
        )


@triton.jit(do_not_specialize=["num_pairs"], do_not_specialize_on_alignment=["lse_a_ptr", "lse_b_ptr", "lse_ptr"])
def _merge_pairs_kernel(  # type: ignore[no-untyped-def]
    a_ptr,
    lse_a_ptr,
    b_ptr,
    lse_b_ptr,
    out_ptr,
    lse_ptr,
    num_pairs,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PAIRS: tl.constexpr,
):
    pair = tl.program_id(0).to(tl.int64) * PAIRS + tl.arange(0, PAIRS)
    is_pair = pair < num_pairs
    lse_a = tl.load(lse_a_ptr + pair, mask=is_pair, other=0.0)
    lse_b = tl.load(lse_b_ptr + pair, mask=is_pair, other=0.0)
    top = tl.maximum(lse_a, lse_b)
    # With two empty parts the difference would be inf - inf.
    shift = tl.where(top == -float("inf"), 0.0, top)
    weight_a, weight_b = tl.exp2(lse_a - shift), tl.exp2(lse_b - shift)
    total = weight_a + weight_b
    number = tl.arange(0, BLOCK)[None, :]
    at = pair[:, None] * WIDTH + number
    is_there = is_pair[:, None] & (number < WIDTH)
    # An empty part may hold NaN, and is not read.
    a = tl.load(a_ptr + at, mask=is_there & (weight_a > 0)[:, None], other=0.0).to(tl.float32)
    b = tl.load(b_ptr + at, mask=is_there & (weight_b > 0)[:, None], other=0.0).to(tl.float32)
    out = (a * weight_a[:, None] + b * weight_b[:, None]) / tl.where(total == 0, 1.0, total)[:, None]
    tl.debug_barrier()  # the output may overwrite an LSE that other threads still read
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=is_there)
    tl.store(lse_ptr + pair, shift + tl.log2(total), mask=is_pair)
