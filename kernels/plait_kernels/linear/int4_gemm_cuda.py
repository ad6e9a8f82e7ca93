"""GEMM with 4-bit weights in CUDA C++ for Hopper GPUs: ``int4_skinny_gemm.cu`` and ``int4_wgmma_gemm.cu``.

Kernels are compiled for a form of codes and a tile when a matrix is made, before any graph is captured.

Shapes: N rows, I inputs, O outputs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from plait_kernels.linear.int4 import CHUNK, LEAST_GROUP, MULTIPLE, Int4Weight
from plait_kernels.linear.int4_tiles import SkinnyTile, WgmmaTile
from plait_kernels.nvrtc import Kernel, compile_kernels

_SCALE_KINDS = torch.float16, torch.bfloat16, torch.float32
_CHUNK_BYTES = 2 * CHUNK
"""Of a row."""
_STAGE_INPUTS = CHUNK // 2
_WARP, _WARPGROUP, _WARPGROUP_OUTPUTS = 32, 128, 64
_ALIGNMENT = 1024
"""Of a stage in shared memory."""
_SHARED_BYTES = 228 << 10
"""Of a multiprocessor, for all its blocks."""
_SYSTEM_BYTES = 1024
"""Of shared memory, that CUDA takes for each block."""


class Launch(NamedTuple):
    """How a kernel is launched."""

    blocks: int
    threads: int
    shared_bytes: int
    cluster: int = 1


def int4_gemm(x_NI: Tensor, weight: Int4Weight, tile: SkinnyTile | WgmmaTile, out_NO: Tensor) -> Tensor:
    """See ``plait_kernels.linear.int4_gemm``."""
    *shape, cluster = launch_of(len(x_NI), weight, tile, _multiprocessors(out_NO.device))
    _kernel_of(weight, tile)(
        (shape[0], shape[1], shape[2]),
        x_NI,
        weight.codes,
        weight.scale,
        weight.scale if weight.zero is None else weight.zero,
        out_NO,
        len(x_NI),
        *weight.shape,
        weight.codes.shape[0],
        out_NO.stride(0),
        pdl=True,
        cluster=cluster,
    )
    return out_NO


def compile_for(weight: Int4Weight, tiles: Iterable[object]) -> None:
    """The kernels that ``int4_gemm`` needs for these tiles."""
    for tile in tiles:
        if isinstance(tile, SkinnyTile | WgmmaTile):
            _kernel_of(weight, tile)


def defines_of(weight: Int4Weight, tile: SkinnyTile | WgmmaTile) -> tuple[str, ...]:
    """What the source is compiled for."""
    zero = () if weight.zero is None else ("HAS_ZERO",)
    form = f"GROUP={weight.group_size}", f"SCALE_KIND={_SCALE_KINDS.index(weight.scale.dtype)}", *zero
    return (*form, *(f"{name}={value}" for name, value in tile.defines().items()))


def launch_of(num_rows: int, weight: Int4Weight, tile: SkinnyTile | WgmmaTile, multiprocessors: int) -> Launch:
    """Blocks and their shared memory for so many rows, on a GPU with so many multiprocessors."""
    if isinstance(tile, SkinnyTile):
        return _skinny_launch(num_rows, weight, tile, multiprocessors)
    panels = math.ceil(num_rows / tile.rows) * math.ceil(weight.shape[0] / (_WARPGROUP_OUTPUTS * tile.warpgroups))
    splits = min(tile.splits, weight.codes.shape[0])
    return Launch(panels * splits, _WARPGROUP * tile.warpgroups, _wgmma_bytes(weight, tile), splits)


def _skinny_launch(num_rows: int, weight: Int4Weight, tile: SkinnyTile, multiprocessors: int) -> Launch:
    sums = 2 * tile.warps * tile.tiles * MULTIPLE * 8 * 4
    shared_bytes = sums + num_rows * (weight.codes.shape[0] * _CHUNK_BYTES + 16)
    resident = max(1, min(tile.blocks, _SHARED_BYTES // (shared_bytes + _SYSTEM_BYTES)))
    steps = math.ceil(weight.shape[0] / (MULTIPLE * tile.tiles))
    return Launch(min(steps, multiprocessors * resident), _WARP * tile.warps, shared_bytes)


def _wgmma_bytes(weight: Int4Weight, tile: WgmmaTile) -> int:
    outputs, scales = _WARPGROUP_OUTPUTS * tile.warpgroups, max(1, CHUNK // max(LEAST_GROUP, weight.group_size))
    marks = scales * outputs * (weight.scale.element_size() + 1)
    stage = tile.rows * _STAGE_INPUTS * 2 + outputs * _STAGE_INPUTS // 2 + marks
    sums = tile.rows * (outputs + 4) * 4
    return max(tile.stages * math.ceil(stage / _ALIGNMENT) * _ALIGNMENT, sums) + _ALIGNMENT


def _kernel_of(weight: Int4Weight, tile: SkinnyTile | WgmmaTile) -> Kernel:
    return _compiled(type(tile).kernel, defines_of(weight, tile), weight.codes.device)


@functools.cache
def _compiled(name: str, defines: tuple[str, ...], device: torch.device) -> Kernel:
    return compile_kernels(Path(__file__).with_name(f"{name}.cu"), (name,), defines, device)[name]


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
