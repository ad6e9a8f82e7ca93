"""FP8 GEMM in Triton: weights are the tall operand of the tensor cores, rows are cut into tiles of up to 128.

The sum of each 128 inputs is scaled and added in float32. With few rows, programs split the inputs, and the one that
finishes last adds their sums in a fixed order, as in ``skinny_gemm_triton``.

Shapes: N rows, I inputs, O outputs, G groups of 128 inputs.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from plait_kernels.linear.fp8 import GROUP, Fp8Rows, Fp8Weight
from plait_kernels.linear.gemm_tuning import MAX_TILES, Tile
from plait_kernels.pdl import pdl_launch


def fp8_gemm(rows: Fp8Rows, weight: Fp8Weight, tile: Tile, out_NO: Tensor) -> Tensor:
    """See ``plait_kernels.linear.fp8_gemm``; only tiles for up to 64 rows may split the inputs."""
    (num_rows, num_inputs), num_outputs = rows.stored_NI.shape, weight.shape[0]
    row_tile = min(128, max(16, triton.next_power_of_2(num_rows)))
    size = (tile.splits, num_outputs, row_tile) if tile.splits > 1 else (0,)
    grid = (triton.cdiv(num_outputs, tile.outputs), tile.splits, triton.cdiv(num_rows, row_tile))
    _fp8_gemm_kernel[grid](
        rows.stored_NI,
        rows.scale,
        weight.stored_OI,
        weight.scale,
        out_NO,
        torch.empty(size, dtype=torch.float32, device=out_NO.device),
        _split_counters(out_NO.device),
        num_rows,
        num_outputs,
        rows.scale.stride(1),
        NUM_INPUTS=num_inputs,
        IS_EVEN=num_outputs % tile.outputs == 0 and num_inputs % (tile.inputs * tile.splits) == 0,
        BLOCK_ROWS=weight.block_rows,
        IS_GROUPED=weight.block_rows > 0,
        ROWS=row_tile,
        OUTPUTS=tile.outputs,
        INPUTS=tile.inputs,
        GROUP=GROUP,
        SPLITS=tile.splits,
        num_stages=tile.num_stages,
        num_warps=tile.num_warps,
        **pdl_launch(out_NO),
    )
    return out_NO


@functools.cache
def _split_counters(device: torch.device) -> Tensor:
    """Finished splits of each tile of outputs: 0 between calls, which run one after the other on a stream."""
    return torch.zeros(MAX_TILES, dtype=torch.int32, device=device)


@triton.jit(do_not_specialize=["num_rows", "scale_stride"])  # type: ignore[untyped-decorator]
def _fp8_gemm_kernel(  # type: ignore[no-untyped-def]  # budget: one loop over the inputs
    x_ptr,
    x_scale_ptr,
    weight_ptr,
    scale_ptr,
    out_ptr,
    part_ptr,
    arrived_ptr,
    num_rows,
    num_outputs,
    scale_stride,
    NUM_INPUTS: tl.constexpr,
    IS_EVEN: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    IS_GROUPED: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    GROUP: tl.constexpr,
    SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    is_row, is_output = row < num_rows, output < num_outputs
    NUM_GROUPS: tl.constexpr = (NUM_INPUTS + GROUP - 1) // GROUP
    NUM_OWN: tl.constexpr = (NUM_INPUTS + INPUTS * SPLITS - 1) // (INPUTS * SPLITS) * INPUTS
    first = tl.program_id(1) * NUM_OWN
    column = first + tl.arange(0, INPUTS)
    weight_at = weight_ptr + output.to(tl.int64)[:, None] * NUM_INPUTS + column[None, :]
    x_at = x_ptr + row.to(tl.int64)[None, :] * NUM_INPUTS + column[:, None]
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    sums = tl.zeros([OUTPUTS, ROWS], tl.float32)
    for begin in range(0, NUM_OWN, INPUTS):
        if IS_EVEN:
            weight = tl.load(weight_at + begin)
            x = tl.load(x_at + begin, mask=is_row[None, :], other=0.0)
        else:
            is_input = begin + column < NUM_INPUTS
            weight = tl.load(weight_at + begin, mask=is_output[:, None] & is_input[None, :], other=0.0)
            x = tl.load(x_at + begin, mask=is_row[None, :] & is_input[:, None], other=0.0)
        part = tl.dot(weight, x)
        if IS_GROUPED:
            group = (first + begin) // GROUP
            is_group = group < NUM_GROUPS
            x_scale = tl.load(x_scale_ptr + group * scale_stride + row, mask=is_row & is_group, other=0.0)
            if BLOCK_ROWS >= OUTPUTS:
                block = tl.program_id(0) * OUTPUTS // BLOCK_ROWS
                w_scale = tl.load(scale_ptr + block * NUM_GROUPS + group, mask=is_group, other=0.0)
                sums += part * (x_scale * w_scale)[None, :]
            else:
                scale_at = scale_ptr + output // BLOCK_ROWS * NUM_GROUPS + group
                w_scale = tl.load(scale_at, mask=is_output & is_group, other=0.0)
                sums += part * w_scale[:, None] * x_scale[None, :]
        else:
            sums += part
    if SPLITS > 1:
        own = tl.arange(0, ROWS)
        part_at = part_ptr + output[:, None] * ROWS + own[None, :]
        size = num_outputs * ROWS
        tl.store(part_at + tl.program_id(1) * size, sums, mask=is_output[:, None])
        tl.debug_barrier()
        arrived_at = arrived_ptr + tl.program_id(0)
        if tl.atomic_add(arrived_at, 1, sem="acq_rel") < SPLITS - 1:
            return
        tl.debug_barrier()
        sums = tl.load(part_at, mask=is_output[:, None], cache_modifier=".cg")
        for split in tl.static_range(1, SPLITS):
            sums += tl.load(part_at + split * size, mask=is_output[:, None], cache_modifier=".cg")
        tl.store(arrived_at, 0)
    if not IS_GROUPED:
        x_scale = tl.load(x_scale_ptr + row, mask=is_row, other=0.0)
        w_scale = tl.load(scale_ptr + output, mask=is_output, other=0.0)
        sums = sums * w_scale[:, None] * x_scale[None, :]
    out_at = out_ptr + row.to(tl.int64)[None, :] * num_outputs + output[:, None]
    tl.store(out_at, sums.to(out_ptr.dtype.element_ty), mask=is_row[None, :] & is_output[:, None])
