"""GEMV in Triton: a program computes a few outputs and reads their weights once, in order.

cuBLAS pads the row to a tile and, for tall matrices, adds partial sums in a second kernel; on an H200 that takes 1.04
(24576 x 4096) to 1.18 (4096 x 4096) times as long. With the norm before it fused, each program reads the whole input
once more, from the L2 cache, and a kernel is saved; the fused gate saves another. A program loads its first weights
before it waits for the previous kernel (PDL). FP8 weights are multiplied by the row as it is, which is not quantised.

Shapes: I inputs, O outputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from plait_kernels.linear.fp8 import GROUP, Fp8Weight
from plait_kernels.linear.reference import RowNorm
from plait_kernels.pdl import pdl_launch


@dataclass(frozen=True, slots=True)
class _Tile:
    """Tile sizes of a program."""

    outputs: int
    inputs: int
    num_warps: int


def gemv(x_1I: Tensor, weight_OI: Tensor | Fp8Weight, out_1O: Tensor | None = None, _tile: object = None) -> Tensor:
    """See ``plait_kernels.linear.gemv``; all contiguous."""
    out_1O = x_1I.new_empty(1, weight_OI.shape[0]) if out_1O is None else out_1O
    _launch(x_1I, None, weight_OI, out_1O, x_1I, is_gated=False)
    return out_1O


def rmsnorm_gemv(
    x_1I: Tensor, norm: RowNorm, weight_OI: Tensor | Fp8Weight, _tile: object = None
) -> tuple[Tensor, Tensor]:
    """See ``plait_kernels.linear.rmsnorm_gemv``; all contiguous."""
    out_1O, sum_1I = x_1I.new_empty(1, weight_OI.shape[0]), torch.empty_like(x_1I)
    _launch(x_1I, norm, weight_OI, out_1O, sum_1I, is_gated=False)
    return out_1O, sum_1I


def gate_up_silu(x_1I: Tensor, gate_up_OI: Tensor | Fp8Weight, _tile: object = None) -> Tensor:
    """See ``plait_kernels.linear.gate_up_silu``; all contiguous."""
    out_1O = x_1I.new_empty(1, gate_up_OI.shape[0] // 2)
    _launch(x_1I, None, gate_up_OI, out_1O, x_1I, is_gated=True)
    return out_1O


def rmsnorm_gate_up_silu(
    x_1I: Tensor, norm: RowNorm, gate_up_OI: Tensor | Fp8Weight, _tile: object = None
) -> tuple[Tensor, Tensor]:
    """See ``plait_kernels.linear.rmsnorm_gate_up_silu``; all contiguous."""
    out_1O, sum_1I = x_1I.new_empty(1, gate_up_OI.shape[0] // 2), torch.empty_like(x_1I)
    _launch(x_1I, norm, gate_up_OI, out_1O, sum_1I, is_gated=True)
    return out_1O, sum_1I


def _launch(
    x_1I: Tensor, norm: RowNorm | None, weight_OI: Tensor | Fp8Weight, out_1O: Tensor, sum_1I: Tensor, *, is_gated: bool
) -> None:
    num_outputs, num_inputs = out_1O.shape[1], x_1I.shape[1]
    fp8 = weight_OI if isinstance(weight_OI, Fp8Weight) else None
    choose = _fp8_tile if fp8 else _tile
    tile = choose(num_inputs, is_gated=is_gated, has_norm=norm is not None)
    _gemv_kernel[(triton.cdiv(num_outputs, tile.outputs),)](
        x_1I,
        norm.residual_1I if norm else x_1I,
        norm.weight_I if norm else x_1I,
        fp8.stored_OI if fp8 else weight_OI,
        fp8.scale if fp8 else x_1I,
        sum_1I,
        out_1O,
        num_outputs,
        norm.eps if norm else 0.0,
        NUM_INPUTS=num_inputs,
        IS_EVEN=num_outputs % tile.outputs == 0 and num_inputs % tile.inputs == 0,
        OUTPUTS=tile.outputs,
        INPUTS=tile.inputs,
        HAS_NORM=norm is not None,
        IS_GATED=is_gated,
        IS_SCALED=fp8 is not None and not fp8.block_rows,
        BLOCK_ROWS=fp8.block_rows if fp8 else 0,
        GROUP=GROUP,
        num_warps=tile.num_warps,
        **pdl_launch(x_1I),
    )


def _tile(num_inputs: int, *, is_gated: bool, has_norm: bool) -> _Tile:
    """The fastest of 13 on an H200 for a model of 4096 x 12288 (us; in brackets the floor at 4.28 TB/s).

    Gated 46.9 (47.0), after a norm 15.3 (11.8), plain 9.5 (7.8) and 24.2 (23.5).
    """
    if is_gated:
        return _Tile(2, min(4096, triton.next_power_of_2(num_inputs)), 8)
    if has_norm:
        return _Tile(1, min(4096, triton.next_power_of_2(num_inputs)), 4)
    return _Tile(2, 1024, 4)


def _fp8_tile(num_inputs: int, *, is_gated: bool, has_norm: bool) -> _Tile:
    """The fastest of five on an H200, as above (floors of half the bytes).

    Gated after a norm 32.2 (23.5), after a norm 11.1 (5.9), plain 6.5 (3.9) and 15.8 (11.8).
    """
    inputs = triton.next_power_of_2(num_inputs)
    if is_gated:
        return _Tile(2, min(4096, inputs), 4)
    if has_norm:
        return _Tile(4, min(2048, inputs), 8) if num_inputs > 2048 else _Tile(4, min(1024, inputs), 4)
    return _Tile(2, 1024 if num_inputs > 8192 else min(2048, inputs), 4)


@triton.jit
def _gemv_kernel(  # type: ignore[no-untyped-def]  # budget: one loop over the inputs
    x_ptr,
    residual_ptr,
    norm_ptr,
    weight_ptr,
    scale_ptr,
    sum_ptr,
    out_ptr,
    num_outputs,
    eps,
    NUM_INPUTS: tl.constexpr,
    IS_EVEN: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    IS_GATED: tl.constexpr,
    IS_SCALED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    PDL: tl.constexpr,
):
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    column = tl.arange(0, INPUTS)
    row = weight_ptr + output.to(tl.int64)[:, None] * NUM_INPUTS
    up_row = row + num_outputs.to(tl.int64) * NUM_INPUTS
    weight = _tile_of(row, output, column, num_outputs, NUM_INPUTS, IS_EVEN)
    up = _tile_of(up_row, output, column, num_outputs, NUM_INPUTS, IS_EVEN) if IS_GATED else weight
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    sums = tl.zeros([OUTPUTS, INPUTS], tl.float32)
    up_sums = tl.zeros([OUTPUTS, INPUTS], tl.float32)
    squares = tl.zeros([INPUTS], tl.float32)
    NUM_GROUPS: tl.constexpr = (NUM_INPUTS + GROUP - 1) // GROUP
    for begin in tl.static_range(0, NUM_INPUTS, INPUTS):
        at = begin + column
        if begin > 0:
            weight = _tile_of(row, output, at, num_outputs, NUM_INPUTS, IS_EVEN)
            up = _tile_of(up_row, output, at, num_outputs, NUM_INPUTS, IS_EVEN) if IS_GATED else weight
        x = _input_of(x_ptr, at, NUM_INPUTS, IS_EVEN)
        if HAS_NORM:
            total = (x + _input_of(residual_ptr, at, NUM_INPUTS, IS_EVEN)).to(sum_ptr.dtype.element_ty)
            if tl.program_id(0) == 0:
                tl.store(sum_ptr + at, total, mask=at < NUM_INPUTS)
            x = total.to(tl.float32)
            squares += x * x
            x *= _input_of(norm_ptr, at, NUM_INPUTS, IS_EVEN)
        if BLOCK_ROWS > 0:  # a program's outputs lie in one block
            scale_at = scale_ptr + tl.program_id(0) * OUTPUTS // BLOCK_ROWS * NUM_GROUPS + at // GROUP
            is_input = at < NUM_INPUTS
            up_x = x
            if IS_GATED:
                up_scale_at = scale_at + num_outputs // BLOCK_ROWS * NUM_GROUPS
                up_x = x * tl.load(up_scale_at, mask=is_input, other=0.0)
            x *= tl.load(scale_at, mask=is_input, other=0.0)
            sums += weight.to(tl.float32) * x[None, :]
            if IS_GATED:
                up_sums += up.to(tl.float32) * up_x[None, :]
        else:
            sums += weight.to(tl.float32) * x[None, :]
            if IS_GATED:
                up_sums += up.to(tl.float32) * x[None, :]
    # The norm's factor is the same for all inputs: it is applied to their sum.
    scale = tl.rsqrt(tl.sum(squares, axis=0) / NUM_INPUTS + eps) if HAS_NORM else 1.0
    out = tl.sum(sums, axis=1) * scale
    gated = tl.sum(up_sums, axis=1) * scale
    if IS_SCALED:
        is_output = output < num_outputs
        out *= tl.load(scale_ptr + output, mask=is_output, other=0.0)
        if IS_GATED:
            gated *= tl.load(scale_ptr + num_outputs + output, mask=is_output, other=0.0)
    if IS_GATED:
        out = out * tl.sigmoid(out) * gated
    tl.store(out_ptr + output, out.to(out_ptr.dtype.element_ty), mask=output < num_outputs)


@triton.jit
def _tile_of(row, output, at, num_outputs, NUM_INPUTS: tl.constexpr, IS_EVEN: tl.constexpr):  # type: ignore[no-untyped-def]
    if IS_EVEN:  # masks cost a tenth of the speed
        return tl.load(row + at[None, :])
    return tl.load(row + at[None, :], mask=(output < num_outputs)[:, None] & (at < NUM_INPUTS)[None, :], other=0.0)


@triton.jit
def _input_of(ptr, at, NUM_INPUTS: tl.constexpr, IS_EVEN: tl.constexpr):  # type: ignore[no-untyped-def]
    if IS_EVEN:
        return tl.load(ptr + at).to(tl.float32)
    return tl.load(ptr + at, mask=at < NUM_INPUTS, other=0.0).to(tl.float32)
