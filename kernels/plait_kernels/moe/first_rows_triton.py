"""Of sorted pairs the first ones, so many as the device has counted: those of experts that are here.

Shapes: N pairs of row and expert, H the hidden size, I an expert's width.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from plait_kernels.pdl import pdl_launch, pdl_wait

_BLOCK = 1024


def take_first_rows(x_TH: Tensor, order_N: Tensor, top_k: int, num_1: Tensor) -> Tensor:
    """Row ``order_N[n] // top_k`` for each of the first ``num_1`` pairs, ``[N, H]``; the rest has any value."""
    hidden_size = x_TH.shape[1]
    out_NH = x_TH.new_empty(len(order_N), hidden_size)
    _take_kernel[(len(order_N),)](
        *(x_TH, order_N, num_1, out_NH),
        TOP_K=top_k,
        WIDTH=hidden_size,
        BLOCK=_BLOCK,
        num_warps=4,
        **pdl_launch(x_TH),
    )
    return out_NH


def silu_mul_first_rows(gate_up_NJ: Tensor, num_1: Tensor) -> Tensor:
    """``silu(gate) * up`` of the first ``num_1`` pairs, ``[N, I]``; the rest has any value."""
    num_pairs, width = len(gate_up_NJ), gate_up_NJ.shape[1] // 2
    out_NI = gate_up_NJ.new_empty(num_pairs, width)
    _silu_mul_kernel[(num_pairs,)](
        *(gate_up_NJ, num_1, out_NI), WIDTH=width, BLOCK=_BLOCK, num_warps=4, **pdl_launch(gate_up_NJ)
    )
    return out_NI


@triton.jit
def _take_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    order_ptr,
    num_ptr,
    out_ptr,
    TOP_K: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl_wait(PDL)
    pair = tl.program_id(0).to(tl.int64)
    if pair < tl.load(num_ptr):
        row = tl.load(order_ptr + pair) // TOP_K
        for begin in range(0, WIDTH, BLOCK):
            column = begin + tl.arange(0, BLOCK)
            x = tl.load(x_ptr + row * WIDTH + column, mask=column < WIDTH)
            tl.store(out_ptr + pair * WIDTH + column, x, mask=column < WIDTH)


@triton.jit
def _silu_mul_kernel(  # type: ignore[no-untyped-def]
    gate_up_ptr,
    num_ptr,
    out_ptr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl_wait(PDL)
    pair = tl.program_id(0).to(tl.int64)
    if pair < tl.load(num_ptr):
        for begin in range(0, WIDTH, BLOCK):
            column = begin + tl.arange(0, BLOCK)
            is_there = column < WIDTH
            gate = tl.load(gate_up_ptr + pair * 2 * WIDTH + column, mask=is_there, other=0.0).to(tl.float32)
            up = tl.load(gate_up_ptr + (pair * 2 + 1) * WIDTH + column, mask=is_there, other=0.0).to(tl.float32)
            gated = (gate * tl.sigmoid(gate) * up).to(out_ptr.dtype.element_ty)
            tl.store(out_ptr + pair * WIDTH + column, gated, mask=is_there)
