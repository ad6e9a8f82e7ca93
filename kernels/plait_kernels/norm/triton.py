"""RMS norm in Triton: one program a row. Shapes: N rows, D the normalised width."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from plait_kernels.pdl import pdl_launch, pdl_wait


def add_rms_norm(x_ND: Tensor, residual_ND: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See ``plait_kernels.norm.add_rms_norm``; rows are contiguous, the sum is rounded before it is normalised."""
    num_rows, width = x_ND.shape
    normed_ND, sum_ND = torch.empty_like(x_ND), torch.empty_like(x_ND)
    if num_rows:
        block = triton.next_power_of_2(width)
        _add_rms_norm_kernel[(num_rows,)](
            x_ND,
            residual_ND,
            weight_D,
            normed_ND,
            sum_ND,
            width,
            eps,
            BLOCK=block,
            num_warps=min(16, max(1, block // 512)),
            **pdl_launch(x_ND),
        )
    return normed_ND, sum_ND


@triton.jit
def _add_rms_norm_kernel(  # type: ignore[no-untyped-def]
    x_ptr, residual_ptr, weight_ptr, normed_ptr, sum_ptr, width, eps, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * width
    column = tl.arange(0, BLOCK)
    is_there = column < width
    weight = tl.load(weight_ptr + column, mask=is_there, other=0.0).to(tl.float32)
    pdl_wait(PDL)
    x = tl.load(x_ptr + row + column, mask=is_there, other=0.0)
    residual = tl.load(residual_ptr + row + column, mask=is_there, other=0.0)
    total = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
    tl.store(sum_ptr + row + column, total, mask=is_there)
    wide = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / width + eps)
    tl.store(normed_ptr + row + column, (wide * scale * weight).to(x.dtype), mask=is_there)
