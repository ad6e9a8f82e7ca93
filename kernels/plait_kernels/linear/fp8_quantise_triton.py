"""Rows to FP8 in Triton, alone or with the norm or gate before it: a program takes a row.

Shapes: N rows, I the width of a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from plait_kernels.linear.fp8 import FP8, GROUP, LARGEST, LEAST, ROWS_MULTIPLE, Fp8Rows
from plait_kernels.linear.reference import RowNorm
from plait_kernels.pdl import pdl_launch, pdl_wait

_FEW_ROWS = 512
"""Up to which a multiprocessor has some four."""


def quantise_rows(x_NI: Tensor, *, is_grouped: bool) -> Fp8Rows:
    """See ``plait_kernels.linear.quantise_rows``."""
    x_NI = x_NI.contiguous()
    rows = empty_rows(x_NI, *x_NI.shape, is_grouped=is_grouped)
    _launch(x_NI, None, rows, x_NI, is_gated=False, is_grouped=is_grouped)
    return rows


def rmsnorm_quantise(x_NI: Tensor, norm: RowNorm, *, is_grouped: bool) -> tuple[Fp8Rows, Tensor]:
    """See ``plait_kernels.linear.rmsnorm_quantise``."""
    rows, sum_NI = empty_rows(x_NI, *x_NI.shape, is_grouped=is_grouped), torch.empty_like(x_NI)
    _launch(x_NI, norm, rows, sum_NI, is_gated=False, is_grouped=is_grouped)
    return rows, sum_NI


def add_rms_norm_quantise(x_NI: Tensor, norm: RowNorm, *, is_grouped: bool) -> tuple[Tensor, Fp8Rows, Tensor]:
    """See ``plait_kernels.linear.add_rms_norm_quantise``."""
    rows, sum_NI = empty_rows(x_NI, *x_NI.shape, is_grouped=is_grouped), torch.empty_like(x_NI)
    normed_NI = torch.empty_like(x_NI)
    _launch(x_NI, norm, rows, sum_NI, normed_NI, is_gated=False, is_grouped=is_grouped)
    return normed_NI, rows, sum_NI


def silu_mul_quantise(gate_up_N2I: Tensor, *, is_grouped: bool) -> Fp8Rows:
    """See ``plait_kernels.linear.silu_mul_quantise``."""
    rows = empty_rows(gate_up_N2I, len(gate_up_N2I), gate_up_N2I.shape[1] // 2, is_grouped=is_grouped)
    _launch(gate_up_N2I, None, rows, gate_up_N2I, is_gated=True, is_grouped=is_grouped)
    return rows


def empty_rows(like: Tensor, num_rows: int, width: int, *, is_grouped: bool) -> Fp8Rows:
    """Of any value, on the device of ``like``; with room for whole fours, and a scale for each group or each row."""
    num_groups = triton.cdiv(width, GROUP) if is_grouped else 1
    whole = triton.cdiv(num_rows, ROWS_MULTIPLE) * ROWS_MULTIPLE
    scale = torch.empty(num_groups, whole, dtype=torch.float32, device=like.device).t()[:num_rows]
    return Fp8Rows(torch.empty(whole, width, dtype=FP8, device=like.device)[:num_rows], scale)


def _launch(
    x_NI: Tensor,
    norm: RowNorm | None,
    rows: Fp8Rows,
    sum_NI: Tensor,
    normed_NI: Tensor | None = None,
    *,
    is_gated: bool,
    is_grouped: bool,
) -> None:
    num_rows, width = rows.stored_NI.shape
    if num_rows == 0:
        return
    block = max(GROUP, triton.next_power_of_2(width))
    _quantise_kernel[(num_rows,)](
        x_NI,
        norm.residual_1I if norm else x_NI,
        norm.weight_I if norm else x_NI,
        sum_NI,
        x_NI if normed_NI is None else normed_NI,
        rows.stored_NI,
        rows.scale,
        rows.scale.stride(1),
        norm.eps if norm else 0.0,
        WIDTH=width,
        BLOCK=block,
        GROUP=GROUP,
        LARGEST=LARGEST,
        LEAST=LEAST,
        HAS_NORM=norm is not None,
        KEEPS_NORM=normed_NI is not None,
        IS_GATED=is_gated,
        IS_GROUPED=is_grouped,
        num_warps=_num_warps(block, num_rows),
        **pdl_launch(x_NI),
    )


def _num_warps(block: int, num_rows: int) -> int:
    """More than 8 hasten a wide row, and slow down many: on an H200 8,192 rows of 12,288 with gates 119 us, not 136."""
    most = 16 if num_rows <= _FEW_ROWS else 8
    return min(most, max(1, block // 512))


@triton.jit(do_not_specialize=["scale_stride"])  # type: ignore[untyped-decorator]
def _quantise_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    residual_ptr,
    norm_ptr,
    sum_ptr,
    normed_ptr,
    out_ptr,
    scale_ptr,
    scale_stride,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    LARGEST: tl.constexpr,
    LEAST: tl.constexpr,
    HAS_NORM: tl.constexpr,
    KEEPS_NORM: tl.constexpr,
    IS_GATED: tl.constexpr,
    IS_GROUPED: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    is_there = column < WIDTH
    if HAS_NORM:
        weight = tl.load(norm_ptr + column, mask=is_there, other=0.0).to(tl.float32)
    pdl_wait(PDL)
    if IS_GATED:
        gate = tl.load(x_ptr + row * 2 * WIDTH + column, mask=is_there, other=0.0).to(tl.float32)
        up = tl.load(x_ptr + (row * 2 + 1) * WIDTH + column, mask=is_there, other=0.0).to(tl.float32)
        x = gate * tl.sigmoid(gate) * up
    else:
        x = tl.load(x_ptr + row * WIDTH + column, mask=is_there, other=0.0).to(tl.float32)
    if HAS_NORM:
        residual = tl.load(residual_ptr + row * WIDTH + column, mask=is_there, other=0.0).to(tl.float32)
        total = (x + residual).to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + row * WIDTH + column, total, mask=is_there)
        x = total.to(tl.float32)
        x = x * tl.rsqrt(tl.sum(x * x, axis=0) / WIDTH + eps) * weight
        if KEEPS_NORM:
            normed = x.to(normed_ptr.dtype.element_ty)
            tl.store(normed_ptr + row * WIDTH + column, normed, mask=is_there)
            x = normed.to(tl.float32)
    if IS_GROUPED:
        GROUPS: tl.constexpr = BLOCK // GROUP
        x = tl.reshape(x, [GROUPS, GROUP])
        largest = tl.max(tl.abs(x), axis=1)
        factor = tl.where(largest < LEAST, 0.0, LARGEST / largest)
        stored = tl.reshape(x * factor[:, None], [BLOCK])
        group = tl.arange(0, GROUPS)
        is_group = group < (WIDTH + GROUP - 1) // GROUP
        tl.store(scale_ptr + group.to(tl.int64) * scale_stride + row, largest / LARGEST, mask=is_group)
    else:
        largest = tl.max(tl.abs(x), axis=0)
        stored = x * tl.where(largest < LEAST, 0.0, LARGEST / largest)
        tl.store(scale_ptr + row, largest / LARGEST)
    tl.store(out_ptr + row * WIDTH + column, stored.to(out_ptr.dtype.element_ty), mask=is_there)
