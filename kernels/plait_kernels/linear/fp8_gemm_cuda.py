"""GEMM with FP8 weights in CUDA C++ for Hopper GPUs: ``fp8_row_gemm``, ``fp8_wgmma_gemm`` and ``fp8_tma_gemm``.

Kernels are compiled for a form of rows and weights and a tile when a matrix is made, before any graph is captured.

Shapes: N rows, I inputs, O outputs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from plait_kernels.linear.cuda_gemm import (
    WARP,
    WARPGROUP,
    WARPGROUP_OUTPUTS,
    Launch,
    compile_all,
    kernel,
    num_multiprocessors,
)
from plait_kernels.linear.fp8 import GROUP, MAX_FAST_INPUTS, Fp8Rows, Fp8Weight
from plait_kernels.linear.fp8_tiles import (
    Fp8CudaTile,
    Fp8GemmTile,
    Fp8RowTile,
    Fp8TmaTile,
    Fp8WgmmaTile,
    can_gate,
)
from plait_kernels.linear.reference import RowNorm
from plait_kernels.nvrtc import Kernel
from plait_kernels.tensor_map import row_map

_TILE = 16
"""Outputs of one."""
_ALIGNMENT = 1024
"""Of a stage in shared memory."""
_BARRIER_BYTES = 16
"""Of a stage: one says that it is full, one that it is empty."""


class Form(NamedTuple):
    """What a kernel is compiled for, beside its tile."""

    has_blocks: bool
    """Of weights, each with a scale; rows of a GEMM are grouped then."""
    has_norm: bool = False
    is_gated: bool = False

    def defines(self) -> tuple[str, ...]:
        """Of those that are true."""
        return tuple(name.upper() for name, value in self._asdict().items() if value)


def fp8_gemm(rows: Fp8Rows, weight: Fp8Weight, tile: Fp8GemmTile, out_NO: Tensor) -> Tensor:
    """See ``plait_kernels.linear.fp8_gemm``."""
    if isinstance(tile, Fp8TmaTile):
        return _tma_gemm(rows, weight, tile, out_NO)
    return _gemm(rows, weight, tile, out_NO, Form(weight.block_rows > 0))


def fp8_gate_up_silu(rows: Fp8Rows, gate_up: Fp8Weight, tile: Fp8WgmmaTile, out_NO: Tensor) -> Tensor:
    """See ``plait_kernels.linear.fp8_gate_up_silu``."""
    return _gemm(rows, gate_up, tile, out_NO, Form(gate_up.block_rows > 0, is_gated=True))


def _gemm(rows: Fp8Rows, weight: Fp8Weight, tile: Fp8WgmmaTile, out_NO: Tensor, form: Form) -> Tensor:
    blocks, threads, shared_bytes, cluster = gemm_launch(len(out_NO), weight.shape, form, tile)
    _kernel_of(form, tile, out_NO.device)(
        (blocks, threads, shared_bytes),
        rows.stored_NI,
        rows.scale,
        weight.stored_OI,
        weight.scale,
        out_NO,
        len(out_NO),
        *weight.shape,
        rows.scale.stride(1),
        weight.block_rows,
        out_NO.stride(0),
        pdl=True,
        cluster=cluster,
    )
    return out_NO


def _tma_gemm(rows: Fp8Rows, weight: Fp8Weight, tile: Fp8TmaTile, out_NO: Tensor) -> Tensor:
    form = Form(weight.block_rows > 0)
    blocks, threads, shared_bytes, cluster = tma_launch(len(out_NO), weight.shape, form, tile)
    _kernel_of(form, tile, out_NO.device)(
        (blocks, threads, shared_bytes),
        row_map(rows.stored_NI, tile.rows),
        rows.scale,
        row_map(weight.stored_OI, WARPGROUP_OUTPUTS * tile.warpgroups),
        weight.scale,
        out_NO,
        len(out_NO),
        *weight.shape,
        rows.scale.stride(1),
        weight.block_rows,
        out_NO.stride(0),
        pdl=True,
        cluster=cluster,
    )
    return out_NO


def gemv(x_1I: Tensor, weight: Fp8Weight, out_1O: Tensor | None, tile: Fp8RowTile) -> Tensor:
    """See ``plait_kernels.linear.gemv``."""
    return _row_gemm(x_1I, None, weight, tile, out_1O)[0]


def rmsnorm_gemv(x_1I: Tensor, norm: RowNorm, weight: Fp8Weight, tile: Fp8RowTile) -> tuple[Tensor, Tensor]:
    """See ``plait_kernels.linear.rmsnorm_gemv``."""
    return _row_gemm(x_1I, norm, weight, tile)


def gate_up_silu(x_1I: Tensor, gate_up: Fp8Weight, tile: Fp8RowTile) -> Tensor:
    """See ``plait_kernels.linear.gate_up_silu``."""
    return _row_gemm(x_1I, None, gate_up, tile, is_gated=True)[0]


def rmsnorm_gate_up_silu(x_1I: Tensor, norm: RowNorm, gate_up: Fp8Weight, tile: Fp8RowTile) -> tuple[Tensor, Tensor]:
    """See ``plait_kernels.linear.rmsnorm_gate_up_silu``."""
    return _row_gemm(x_1I, norm, gate_up, tile, is_gated=True)


def _row_gemm(
    x_1I: Tensor,
    norm: RowNorm | None,
    weight: Fp8Weight,
    tile: Fp8RowTile,
    out_1O: Tensor | None = None,
    *,
    is_gated: bool = False,
) -> tuple[Tensor, Tensor]:
    """The outputs, and with a norm the sum before it."""
    form = Form(weight.block_rows > 0, has_norm=norm is not None, is_gated=is_gated)
    sum_1I = x_1I if norm is None else torch.empty_like(x_1I)
    if out_1O is None:
        out_1O = x_1I.new_empty(1, weight.shape[0] // (2 if is_gated else 1))
    residual_1I, norm_I, eps = (x_1I, x_1I, 0.0) if norm is None else norm
    _kernel_of(form, tile, x_1I.device)(
        row_launch(weight.shape, tile, num_multiprocessors(x_1I.device))[:3],
        x_1I,
        residual_1I,
        norm_I,
        weight.stored_OI,
        weight.scale,
        sum_1I,
        out_1O,
        *weight.shape,
        weight.block_rows,
        eps,
        pdl=True,
    )
    return out_1O, sum_1I


def compile_for(weight: Fp8Weight, tiles: Iterable[object]) -> None:
    """The kernels that a matrix needs for these tiles; without one of them the device has none of ours."""
    device = weight.stored_OI.device
    wanted = {(form, tile) for tile in tiles if isinstance(tile, Fp8CudaTile) for form in forms_of(weight, tile)}
    compile_all(lambda each: _kernel_of(*each, device), wanted, device)


def compile_gates(gate_up: Fp8Weight, tiles: Iterable[Fp8WgmmaTile]) -> None:
    """The kernels of ``fp8_gate_up_silu`` for these tiles, of a matrix that has gates; they are few."""
    device, form = gate_up.stored_OI.device, Form(gate_up.block_rows > 0, is_gated=True)
    compile_all(lambda tile: _kernel_of(form, tile, device), set(tiles), device)


def forms_of(weight: Fp8Weight, tile: Fp8CudaTile) -> list[Form]:
    """All in which rows of any matrix may be multiplied; see ``compile_gates`` for those of a few rows with gates."""
    has_blocks = weight.block_rows > 0
    if isinstance(tile, Fp8GemmTile):
        return [Form(has_blocks)]
    gates = (False, True) if can_gate(weight, tile) else (False,)
    return [Form(has_blocks, has_norm, is_gated) for has_norm in (False, True) for is_gated in gates]


def row_launch(shape: tuple[int, int], tile: Fp8RowTile, multiprocessors: int) -> Launch:
    """Blocks and their shared memory for one row, on a GPU with so many multiprocessors."""
    (num_outputs, num_inputs), outputs = shape, _TILE * tile.tiles
    chunks = math.ceil(num_inputs / GROUP)
    ring = tile.warps * tile.ahead * outputs * GROUP
    floats = chunks + tile.warps + 2 * tile.warps * outputs
    steps = math.ceil(num_outputs / outputs)
    return Launch(min(steps, multiprocessors), WARP * tile.warps, ring + chunks * GROUP * 2 + floats * 4)


def gemm_launch(num_rows: int, shape: tuple[int, int], form: Form, tile: Fp8WgmmaTile) -> Launch:
    """The same for so many rows."""
    (num_outputs, num_inputs), outputs = shape, WARPGROUP_OUTPUTS * tile.warpgroups
    scales = 4 * tile.rows
    stage = (tile.rows + outputs) * GROUP + (scales if form.has_blocks else 0)
    stages = tile.stages * math.ceil(stage / _ALIGNMENT) * _ALIGNMENT
    sums = tile.rows * (outputs + 4) * 4
    panels = math.ceil(num_rows / tile.rows) * math.ceil(num_outputs / outputs)
    splits = min(tile.splits, math.ceil(num_inputs / GROUP))
    shared_bytes = max(stages + scales, sums) + _ALIGNMENT
    return Launch(panels * splits, WARPGROUP * tile.warpgroups, shared_bytes, splits)


def tma_launch(num_rows: int, shape: tuple[int, int], form: Form, tile: Fp8TmaTile) -> Launch:
    """The same of the kernel that copies by TMA.

    Raises ``ValueError`` if a cluster's block would have more inputs than the tensor cores' sums are exact enough for,
    which with blocks of weights are never of more than 128.
    """
    (num_outputs, num_inputs), outputs = shape, WARPGROUP_OUTPUTS * tile.warpgroups
    chunks = math.ceil(num_inputs / GROUP)
    splits = min(tile.splits, chunks)
    if not form.has_blocks and math.ceil(chunks / splits) * GROUP > MAX_FAST_INPUTS:
        raise ValueError(f"{tile} splits {num_inputs} inputs into more than {MAX_FAST_INPUTS} each")
    stages = tile.stages * (tile.rows + outputs) * GROUP
    sums = tile.rows * (outputs + 4) * 4
    panels = math.ceil(num_rows / tile.rows) * math.ceil(num_outputs / outputs)
    scales = 4 * tile.rows * tile.stages if form.has_blocks else 0
    shared_bytes = max(stages, sums) + _BARRIER_BYTES * tile.stages + scales + _ALIGNMENT
    return Launch(panels * splits, WARPGROUP * tile.warpgroups + WARP, shared_bytes, splits)


def defines_of(form: Form, tile: Fp8CudaTile) -> tuple[str, ...]:
    """What the source is compiled for."""
    return (*form.defines(), *(f"{name}={value}" for name, value in tile.defines().items()))


def _kernel_of(form: Form, tile: Fp8CudaTile, device: torch.device) -> Kernel:
    return kernel(type(tile).kernel, defines_of(form, tile), device)
