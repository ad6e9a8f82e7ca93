"""MLA's up-projection of values for a few rows in Triton: a program computes some dims of one head.

Without PDL: FlashMLA's kernels let the next one start before they have stored, and where no row is split the one that
combines ends without waiting for the one that attends. Shapes as in ``plait_kernels.mla``.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_DIMS = 8


def up_project_values(out_BHL: Tensor, value_HVL: Tensor, out_BHV: Tensor) -> None:
    """See ``plait_kernels.mla.up_project_values``; the last dimensions are contiguous."""
    num_rows, num_heads, latent_dim = out_BHL.shape
    value_dim = value_HVL.shape[1]
    if num_rows == 0:
        return
    _up_project_kernel[(triton.cdiv(value_dim, _DIMS), num_heads)](
        out_BHL,
        value_HVL,
        out_BHV,
        *out_BHL.stride()[:2],
        *value_HVL.stride()[:2],
        *out_BHV.stride()[:2],
        NUM_ROWS=num_rows,
        VALUE_DIM=value_dim,
        LATENT_DIM=latent_dim,
        BLOCK=triton.next_power_of_2(latent_dim),
        DIMS=_DIMS,
        num_warps=4,
    )


@triton.jit
def _up_project_kernel(  # type: ignore[no-untyped-def]
    latent_ptr,
    value_ptr,
    out_ptr,
    latent_row_stride,
    latent_head_stride,
    value_head_stride,
    value_dim_stride,
    out_row_stride,
    out_head_stride,
    NUM_ROWS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    LATENT_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    DIMS: tl.constexpr,
):
    dim, head = tl.program_id(0) * DIMS + tl.arange(0, DIMS), tl.program_id(1).to(tl.int64)
    column = tl.arange(0, BLOCK)
    is_dim, is_column = dim < VALUE_DIM, column < LATENT_DIM
    value_at = value_ptr + head * value_head_stride + dim[:, None] * value_dim_stride + column[None, :]
    value = tl.load(value_at, mask=is_dim[:, None] & is_column[None, :], other=0.0).to(tl.float32)
    for row in tl.static_range(NUM_ROWS):
        latent_at = latent_ptr + row * latent_row_stride + head * latent_head_stride
        latent = tl.load(latent_at + column, mask=is_column, other=0.0).to(tl.float32)
        made = tl.sum(value * latent[None, :], axis=1)
        out_at = out_ptr + row * out_row_stride + head * out_head_stride
        tl.store(out_at + dim, made.to(out_ptr.dtype.element_ty), mask=is_dim)
