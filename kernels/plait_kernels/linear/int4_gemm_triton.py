"""GEMM with 4-bit weights in Triton: weights are the tall operand of the tensor cores, rows are cut into tiles.

Codes less their zeros are whole numbers (or e2m1 floats), exact in bfloat16; the sums of a group are scaled in float32.
With few rows, programs split the inputs, and the one that finishes last adds their sums in a fixed order, as in
``skinny_gemm_triton``. With very many rows it is faster to de-quantise the matrix and to multiply in bfloat16.

Shapes: N rows, I inputs, O outputs.
"""

from __future__ import annotations

import functools
import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from plait_kernels.linear.gemm_tuning import MAX_TILES, Tile
from plait_kernels.linear.int4 import CHUNK, Int4Weight
from plait_kernels.linear.int4_planes_triton import (
    coding,
    in_order,
    in_places,
    places_of,
    plane_values,
    value_of,
    zeros_of,
)
from plait_kernels.pdl import pdl_launch

MIN_ROW_TILE, MAX_ROW_TILE = 8, 128
_OUTPUTS = 64
"""De-quantised by a program, of so many chunks."""
_CHUNKS = 2


def int4_gemm(x_NI: Tensor, weight: Int4Weight, tile: Tile, out_NO: Tensor) -> Tensor:
    """See ``plait_kernels.linear.int4_gemm``; only tiles for up to 64 rows may split the inputs."""
    (num_rows, _), num_outputs = x_NI.shape, weight.shape[0]
    row_tile = min(MAX_ROW_TILE, max(MIN_ROW_TILE, triton.next_power_of_2(num_rows)))
    num_chunks = weight.codes.shape[-4]
    splits = tile.splits if num_chunks % tile.splits == 0 else 1
    size = (splits, num_outputs, row_tile) if splits > 1 else (0,)
    grid = (triton.cdiv(num_rows, row_tile), triton.cdiv(num_outputs, tile.outputs), splits)
    _int4_gemm_kernel[grid](
        x_NI,
        weight.codes,
        weight.scale,
        zeros_of(weight),
        out_NO,
        torch.empty(size, dtype=torch.float32, device=out_NO.device),
        _split_counters(out_NO.device),
        num_rows,
        num_outputs,
        out_NO.stride(0),
        IS_EVEN=num_outputs % tile.outputs == 0 and weight.num_inputs % CHUNK == 0,
        ROWS=row_tile,
        OUTPUTS=tile.outputs,
        AT_ONCE=math.gcd(tile.inputs // CHUNK, num_chunks // splits),
        SPLITS=splits,
        **coding(weight, x_NI),
        num_stages=tile.num_stages,
        num_warps=tile.num_warps,
        **pdl_launch(out_NO),
    )
    return out_NO


def int4_dequantise(weight: Int4Weight, rows: range, out_OI: Tensor) -> Tensor:
    """See ``plait_kernels.linear.int4_dequantise``."""
    num_chunks = weight.codes.shape[-4]
    _dequantise_kernel[(triton.cdiv(len(rows), _OUTPUTS), triton.cdiv(num_chunks, _CHUNKS))](
        weight.codes,
        weight.scale,
        zeros_of(weight),
        out_OI,
        rows.start,
        rows.stop,
        weight.shape[0],
        OUTPUTS=_OUTPUTS,
        CHUNKS=_CHUNKS,
        **{name: value for name, value in coding(weight, out_OI).items() if name != "PAIRS"},
        num_warps=4,
        **pdl_launch(out_OI),
    )
    return out_OI


@functools.cache
def _split_counters(device: torch.device) -> Tensor:
    """Finished splits of each tile of outputs: 0 between calls, which run one after the other on a stream."""
    return torch.zeros(MAX_TILES, dtype=torch.int32, device=device)


@triton.jit(do_not_specialize=["num_rows"])
def _int4_gemm_kernel(  # type: ignore[no-untyped-def]  # budget: one loop over the chunks
    x_ptr,
    codes_ptr,
    scale_ptr,
    zero_ptr,
    out_ptr,
    part_ptr,
    arrived_ptr,
    num_rows,
    num_outputs,
    out_stride,
    NUM_INPUTS: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    IS_FLOAT: tl.constexpr,
    PAIRS: tl.constexpr,
    IS_EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_row, is_output = row < num_rows, output < num_outputs
    NUM_OWN: tl.constexpr = NUM_CHUNKS // SPLITS
    first = tl.program_id(2) * NUM_OWN
    x_at = x_ptr + row.to(tl.int64)[None, :] * NUM_INPUTS
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    sums = chunk_sums(
        *(x_at, is_row, codes_ptr, scale_ptr, zero_ptr, tl.program_id(1) * (OUTPUTS // 16), num_outputs),
        *(first, NUM_OWN, NUM_INPUTS, NUM_CHUNKS, GROUP, HAS_ZERO, IS_FLOAT, PAIRS, IS_EVEN, ROWS, OUTPUTS, AT_ONCE),
    )
    if SPLITS > 1:
        own = tl.arange(0, ROWS)
        part_at = part_ptr + output[:, None] * ROWS + own[None, :]
        size = num_outputs * ROWS
        tl.store(part_at + tl.program_id(2) * size, sums, mask=is_output[:, None])
        tl.debug_barrier()
        arrived_at = arrived_ptr + tl.program_id(1)
        if tl.atomic_add(arrived_at, 1, sem="acq_rel") < SPLITS - 1:
            return
        tl.debug_barrier()
        sums = tl.load(part_at, mask=is_output[:, None], cache_modifier=".cg")
        for split in tl.static_range(1, SPLITS):
            sums += tl.load(part_at + split * size, mask=is_output[:, None], cache_modifier=".cg")
        tl.store(arrived_at, 0)
    out_at = out_ptr + row.to(tl.int64)[None, :] * out_stride + output[:, None]
    tl.store(out_at, sums.to(out_ptr.dtype.element_ty), mask=is_row[None, :] & is_output[:, None])


@triton.jit
def chunk_sums(  # type: ignore[no-untyped-def]  # budget: one loop over the chunks
    x_at,
    is_row,
    codes_ptr,
    scale_ptr,
    zero_ptr,
    tile,
    num_outputs,
    first,
    NUM_OWN: tl.constexpr,
    NUM_INPUTS: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    IS_FLOAT: tl.constexpr,
    PAIRS: tl.constexpr,
    IS_EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """float32 ``[OUTPUTS, ROWS]``, the sums over ``NUM_OWN`` chunks from ``first`` on; rows begin at ``x_at``.

    Outputs begin at the 16 of ``tile``.
    """
    output = tile * 16 + tl.arange(0, OUTPUTS)
    is_output = output < num_outputs
    word = tl.arange(0, 32)
    TILES: tl.constexpr = OUTPUTS // 16
    codes_at, is_tile, size = places_of(codes_ptr, tile, num_outputs, TILES)
    is_whole: tl.constexpr = GROUP >= NUM_INPUTS
    # Scales and zeros are read a chunk ahead: what is not an operand of the tensor cores is not pipelined for us.
    scale_0, scale_1, scale_2, scale_3 = chunk_scales(
        scale_ptr, output, is_output, num_outputs, first, GROUP, NUM_INPUTS
    )
    zero_0, zero_1, zero_2, zero_3 = scale_0, scale_1, scale_2, scale_3
    if HAS_ZERO:
        zero_0, zero_1, zero_2, zero_3 = chunk_scales(
            zero_ptr, output, is_output, num_outputs, first, GROUP, NUM_INPUTS
        )
    sums = tl.zeros([OUTPUTS, ROWS], tl.float32)
    for begin in range(0, NUM_OWN, AT_ONCE):
        for step in tl.static_range(AT_ONCE):
            chunk = first + begin + step
            words = tl.load(codes_at + chunk * size, mask=is_tile, other=0)
            own_0, own_1, own_2, own_3 = scale_0, scale_1, scale_2, scale_3
            less_0, less_1, less_2, less_3 = zero_0, zero_1, zero_2, zero_3
            ahead = tl.minimum(chunk + 1, NUM_CHUNKS - 1)
            if not is_whole:
                scale_0, scale_1, scale_2, scale_3 = chunk_scales(
                    scale_ptr, output, is_output, num_outputs, ahead, GROUP, NUM_INPUTS
                )
                if HAS_ZERO:
                    zero_0, zero_1, zero_2, zero_3 = chunk_scales(
                        zero_ptr, output, is_output, num_outputs, ahead, GROUP, NUM_INPUTS
                    )
            part = tl.zeros([OUTPUTS, ROWS], tl.float32)
            for quarter in tl.static_range(4):
                column = chunk * 128 + quarter * 32 + word
                if IS_EVEN:
                    x = tl.load(x_at + column[:, None], mask=is_row[None, :], other=0.0)
                else:
                    x = tl.load(
                        x_at + column[:, None], mask=is_row[None, :] & (column < NUM_INPUTS)[:, None], other=0.0
                    )
                zero = less_0 if quarter == 0 else (less_1 if quarter == 1 else (less_2 if quarter == 2 else less_3))
                less = _less(zero, HAS_ZERO, PAIRS)
                values = plane_values(words, in_places(less, TILES), quarter, IS_FLOAT, PAIRS, x.dtype)
                values = in_order(values, TILES)
                part = tl.dot(values, x, part)
                if GROUP == 32 and not is_whole:
                    own = own_0 if quarter == 0 else (own_1 if quarter == 1 else (own_2 if quarter == 2 else own_3))
                    sums += part * own.to(tl.float32)[:, None]
                    part = tl.zeros([OUTPUTS, ROWS], tl.float32)
                if GROUP == 64 and not is_whole and quarter % 2 == 1:
                    own = own_0 if quarter == 1 else own_2
                    sums += part * own.to(tl.float32)[:, None]
                    part = tl.zeros([OUTPUTS, ROWS], tl.float32)
            if is_whole:
                sums += part
            elif GROUP >= 128:
                sums += part * own_0.to(tl.float32)[:, None]
    if is_whole:
        sums *= scale_0.to(tl.float32)[:, None]
    return sums


@triton.jit
def chunk_scales(  # type: ignore[no-untyped-def]
    scale_ptr, output, is_output, num_outputs, chunk, GROUP: tl.constexpr, NUM_INPUTS: tl.constexpr
):
    """Of each quarter of a chunk, ``[OUTPUTS]``."""
    first = group_scales(scale_ptr, output, is_output, num_outputs, chunk * 128, GROUP, NUM_INPUTS)
    if GROUP >= 128 or GROUP >= NUM_INPUTS:
        return first, first, first, first
    third = group_scales(scale_ptr, output, is_output, num_outputs, chunk * 128 + 64, GROUP, NUM_INPUTS)
    if GROUP == 64:
        return first, first, third, third
    second = group_scales(scale_ptr, output, is_output, num_outputs, chunk * 128 + 32, GROUP, NUM_INPUTS)
    fourth = group_scales(scale_ptr, output, is_output, num_outputs, chunk * 128 + 96, GROUP, NUM_INPUTS)
    return first, second, third, fourth


@triton.jit
def group_scales(  # type: ignore[no-untyped-def]
    scale_ptr, output, is_output, num_outputs, at, GROUP: tl.constexpr, NUM_INPUTS: tl.constexpr
):
    """Of the group with an input, ``[OUTPUTS]``; the last one's behind the end."""
    group = tl.minimum(at // GROUP, (NUM_INPUTS - 1) // GROUP)
    return tl.load(scale_ptr + group * num_outputs + output, mask=is_output, other=0)


@triton.jit
def _less(zero, HAS_ZERO: tl.constexpr, PAIRS: tl.constexpr):  # type: ignore[no-untyped-def]
    """What makes a code its value when added: see ``plane_values``."""
    from_code: tl.constexpr = 128.0 if PAIRS else 0.0
    less = -from_code - zero.to(tl.float32) if HAS_ZERO else tl.full(zero.shape, -from_code - 8.0, tl.float32)
    return less.to(tl.bfloat16) if PAIRS else less


@triton.jit
def _dequantise_kernel(  # type: ignore[no-untyped-def]
    codes_ptr,
    scale_ptr,
    zero_ptr,
    out_ptr,
    first,
    end,
    num_outputs,
    NUM_INPUTS: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    IS_FLOAT: tl.constexpr,
    OUTPUTS: tl.constexpr,
    CHUNKS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    own = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    output = first + own
    is_output = output < end
    word = tl.arange(0, 32)
    TILES: tl.constexpr = OUTPUTS // 16
    codes_at, is_tile, size = places_of(codes_ptr, first // 16 + tl.program_id(0) * TILES, num_outputs, TILES)
    for step in tl.static_range(CHUNKS):
        chunk = tl.program_id(1) * CHUNKS + step
        is_chunk = chunk < NUM_CHUNKS
        words = tl.load(codes_at + chunk * size, mask=is_tile & is_chunk, other=0)
        for quarter in tl.static_range(4):
            at = chunk * 128 + quarter * 32
            scale = group_scales(scale_ptr, output, is_output, num_outputs, at, GROUP, NUM_INPUTS)
            zero = tl.full(scale.shape, 8.0, tl.float32)
            if HAS_ZERO:
                zero = group_scales(zero_ptr, output, is_output, num_outputs, at, GROUP, NUM_INPUTS).to(tl.float32)
            code = in_order((words >> 4 * quarter) & 15, TILES)
            value = (value_of(code) if IS_FLOAT else code.to(tl.float32) - zero[:, None]) * scale.to(tl.float32)[
                :, None
            ]
            column = at + word
            is_there = is_output[:, None] & (column < NUM_INPUTS)[None, :] & is_chunk
            out_at = out_ptr + own.to(tl.int64)[:, None] * NUM_INPUTS + column[None, :]
            tl.store(out_at, value.to(out_ptr.dtype.element_ty), mask=is_there)
