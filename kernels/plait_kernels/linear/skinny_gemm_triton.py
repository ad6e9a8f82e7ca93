"""Skinny GEMM in Triton, for up to 64 rows: weights are the tall operand of the tensor cores, read once and in order.

cuBLAS pads rows to a tile of 64 and, for tall matrices, adds partial sums in a second kernel. Here the program that
finishes last adds the partial sums of its outputs (split-K), in a fixed order, so that a row's sum is the same each
time. A program loads its first weights before it waits for the previous kernel (PDL).

Shapes: N rows, I inputs, O outputs.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from plait_kernels.linear.gemm_tuning import MAX_TILES, Tile
from plait_kernels.pdl import pdl_launch


def skinny_gemm(x_NI: Tensor, weight_OI: Tensor, tile: Tile, out_NO: Tensor | None = None) -> Tensor:
    """See ``plait_kernels.linear.skinny_gemm``; for up to 64 rows, by a tile that takes the matrix."""
    x_NI = x_NI.contiguous()
    (num_rows, num_inputs), num_outputs = x_NI.shape, weight_OI.shape[0]
    out_NO = x_NI.new_empty(num_rows, num_outputs) if out_NO is None else out_NO
    rows = max(16, triton.next_power_of_2(num_rows))
    size = (tile.splits, num_outputs, rows) if tile.splits > 1 else (0,)
    _skinny_gemm_kernel[(num_outputs // tile.outputs, tile.splits)](
        x_NI,
        weight_OI,
        out_NO,
        torch.empty(size, dtype=torch.float32, device=x_NI.device),
        _split_counters(x_NI.device),
        num_rows,
        num_outputs,
        NUM_INPUTS=num_inputs,
        ROWS=rows,
        OUTPUTS=tile.outputs,
        INPUTS=tile.inputs,
        SPLITS=tile.splits,
        num_stages=tile.num_stages,
        num_warps=tile.num_warps,
        **pdl_launch(x_NI),
    )
    return out_NO


@functools.cache
def _split_counters(device: torch.device) -> Tensor:
    """Finished splits of each tile of outputs: 0 between calls, which run one after the other on a stream."""
    return torch.zeros(MAX_TILES, dtype=torch.int32, device=device)


@triton.jit
def _skinny_gemm_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    weight_ptr,
    out_ptr,
    part_ptr,
    arrived_ptr,
    num_rows,
    num_outputs,
    NUM_INPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    row = tl.arange(0, ROWS)
    is_row = row < num_rows
    NUM_OWN: tl.constexpr = NUM_INPUTS // SPLITS
    column = tl.program_id(1) * NUM_OWN + tl.arange(0, INPUTS)
    weight_at = weight_ptr + output.to(tl.int64)[:, None] * NUM_INPUTS + column[None, :]
    x_at = x_ptr + row[None, :] * NUM_INPUTS + column[:, None]
    weight = tl.load(weight_at)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    sums = tl.dot(weight, tl.load(x_at, mask=is_row[None, :], other=0.0))
    for begin in range(INPUTS, NUM_OWN, INPUTS):
        weight = tl.load(weight_at + begin)
        sums = tl.dot(weight, tl.load(x_at + begin, mask=is_row[None, :], other=0.0), sums)
    if SPLITS > 1:
        part_at = part_ptr + output[:, None] * ROWS + row[None, :]
        size = num_outputs * ROWS
        tl.store(part_at + tl.program_id(1) * size, sums)
        tl.debug_barrier()
        arrived_at = arrived_ptr + tl.program_id(0)
        if tl.atomic_add(arrived_at, 1, sem="acq_rel") < SPLITS - 1:
            return
        tl.debug_barrier()
        sums = tl.load(part_at, cache_modifier=".cg")
        for split in tl.static_range(1, SPLITS):
            sums += tl.load(part_at + split * size, cache_modifier=".cg")
        tl.store(arrived_at, 0)
    out_at = out_ptr + row[None, :] * num_outputs + output[:, None]
    tl.store(out_at, sums.to(out_ptr.dtype.element_ty), mask=is_row[None, :])
