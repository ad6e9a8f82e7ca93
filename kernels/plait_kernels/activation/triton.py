"""Gated activations in Triton. Shapes: N rows, I the MLP's width."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from plait_kernels.pdl import pdl_launch, pdl_wait

_BLOCK = 1024


def silu_mul(gate_up_N2I: Tensor) -> Tensor:
    """See ``plait_kernels.activation.silu_mul``; rows are contiguous, the result is rounded once."""
    num_rows, width = gate_up_N2I.shape[0], gate_up_N2I.shape[1] // 2
    out_NI = gate_up_N2I.new_empty(num_rows, width)
    if num_rows:
        grid = (num_rows, triton.cdiv(width, _BLOCK))
        _silu_mul_kernel[grid](gate_up_N2I, out_NI, width, BLOCK=_BLOCK, **pdl_launch(gate_up_N2I))
    return out_NI


@triton.jit
def _silu_mul_kernel(gate_up_ptr, out_ptr, width, BLOCK: tl.constexpr, PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    pdl_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_there = column < width
    gate = tl.load(gate_up_ptr + row * 2 * width + column, mask=is_there, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * width + width + column, mask=is_there, other=0.0).to(tl.float32)
    out = gate * tl.sigmoid(gate) * up
    tl.store(out_ptr + row * width + column, out.to(out_ptr.dtype.element_ty), mask=is_there)
