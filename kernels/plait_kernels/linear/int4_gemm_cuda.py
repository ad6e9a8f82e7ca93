"""GEMM with 4-bit weights in CUDA C++ for Hopper GPUs: ``int4_skinny_gemm.cu`` and ``int4_wgmma_gemm.cu``.

Kernels are compiled for a form of codes and a tile when a matrix is made, before any graph is captured.

Shapes: N rows, I inputs, O outputs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import replace
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
from plait_kernels.linear.int4 import CHUNK, LEAST_GROUP, MULTIPLE, Int4Weight
from plait_kernels.linear.int4_tiles import CudaTile, SkinnyTile, WgmmaTile
from plait_kernels.nvrtc import Kernel
from plait_kernels.tensor_map import row_map

_SCALE_KINDS = torch.float16, torch.bfloat16, torch.float32
_CHUNK_BYTES = 2 * CHUNK
"""Of a row."""
_ALIGNMENT = 1024
"""Of a slot in shared memory, and bytes before the first one."""
_SHARED_BYTES, _BLOCK_BYTES = 228 << 10, 227 << 10
"""Of a multiprocessor, for all its blocks; of one block at most."""
_SYSTEM_BYTES = 1024
"""Of shared memory, that CUDA takes for each block."""
LEFT_SUMS, LEFT_FLAGS = 1 << 15, 8
"""Of a multiprocessor's blocks: floats, and integers."""


class Left(NamedTuple):
    """What blocks leave for others, on a GPU whose GEMMs run one after the other."""

    sums: Tensor
    flags: Tensor
    """0 between GEMMs."""


def int4_gemm(x_NI: Tensor, weight: Int4Weight, tile: CudaTile, out_NO: Tensor) -> Tensor:
    """See ``plait_kernels.linear.int4_gemm``."""
    launch = launch_of(len(x_NI), weight, tile, num_multiprocessors(out_NO.device))
    _kernel_of(weight, tile)(
        launch[:3],
        row_map(x_NI, tile.rows) if isinstance(tile, WgmmaTile) else x_NI,
        weight.codes,
        weight.scale,
        weight.scale if weight.zero is None else weight.zero,
        out_NO,
        len(x_NI),
        *weight.shape,
        weight.codes.shape[0],
        out_NO.stride(0),
        *(_left(out_NO.device) if isinstance(tile, WgmmaTile) else ()),
        pdl=True,
        cluster=launch.cluster,
    )
    return out_NO


def compile_for(weight: Int4Weight, tiles: Iterable[object]) -> None:
    """The kernels that ``int4_gemm`` needs for these tiles; without one of them the device has none of ours."""
    wanted = {tile for tile in tiles if isinstance(tile, CudaTile)}
    compile_all(lambda tile: _kernel_of(weight, tile), wanted, weight.codes.device)
    if any(isinstance(tile, WgmmaTile) for tile in wanted):
        _left(weight.codes.device)


def defines_of(weight: Int4Weight, tile: CudaTile) -> tuple[str, ...]:
    """What the source is compiled for."""
    zero = () if weight.zero is None else ("HAS_ZERO",)
    if isinstance(tile, WgmmaTile):
        tile = replace(tile, slots=_slots(weight, tile))
    form = f"GROUP={weight.group_size}", f"SCALE_KIND={_SCALE_KINDS.index(weight.scale.dtype)}", *zero
    return (*form, *(f"{name}={value}" for name, value in tile.defines().items()))


def launch_of(num_rows: int, weight: Int4Weight, tile: CudaTile, multiprocessors: int) -> Launch:
    """Blocks and their shared memory for so many rows, on a GPU with so many multiprocessors."""
    if isinstance(tile, SkinnyTile):
        return _skinny_launch(num_rows, weight, tile, multiprocessors)
    tiles, chunks = math.ceil(num_rows / tile.rows) * math.ceil(weight.shape[0] / _outputs(tile)), weight.codes.shape[0]
    cluster = min(tile.splits, chunks)
    blocks = tiles * cluster or min(multiprocessors * tile.blocks, tiles * chunks)
    slots, sums = _slots(weight, tile) * _slot_bytes(weight, tile), tile.rows * (_outputs(tile) + 4) * 4
    shared_bytes = 2 * _ALIGNMENT + max(slots, sums)
    return Launch(blocks, WARPGROUP * tile.warpgroups + WARP * _more_warps(tile), shared_bytes, max(1, cluster))


def _more_warps(tile: WgmmaTile) -> int:
    """Of those that do not multiply, as the kernel has them."""
    # Registers are moved to the warpgroups that multiply, from one that copies.
    if (tile.rows, tile.warpgroups) == (256, 2) or (tile.rows >= 64 and tile.warpgroups == 3):
        return WARPGROUP // WARP
    return 1 if tile.blocks > 2 else 2


def _skinny_launch(num_rows: int, weight: Int4Weight, tile: SkinnyTile, multiprocessors: int) -> Launch:
    sums = 2 * tile.warps * tile.tiles * MULTIPLE * 8 * 4
    shared_bytes = sums + num_rows * (weight.codes.shape[0] * _CHUNK_BYTES + 16)
    resident = max(1, min(tile.blocks, _SHARED_BYTES // (shared_bytes + _SYSTEM_BYTES)))
    steps = math.ceil(weight.shape[0] / (MULTIPLE * tile.tiles))
    return Launch(min(steps, multiprocessors * resident), WARP * tile.warps, shared_bytes)


def _slots(weight: Int4Weight, tile: WgmmaTile) -> int:
    """Those that fit: small groups have more marks."""
    most = min(_BLOCK_BYTES, _SHARED_BYTES // tile.blocks - _SYSTEM_BYTES) - 2 * _ALIGNMENT
    return min(tile.slots, most // _slot_bytes(weight, tile))


def _slot_bytes(weight: Int4Weight, tile: WgmmaTile) -> int:
    scales = max(1, CHUNK // max(LEAST_GROUP, weight.group_size))
    marks = scales * _outputs(tile) * (weight.scale.element_size() + 1)
    slot = tile.rows * _CHUNK_BYTES + _outputs(tile) * CHUNK // 2 + marks
    return math.ceil(slot / _ALIGNMENT) * _ALIGNMENT


def _outputs(tile: WgmmaTile) -> int:
    return WARPGROUP_OUTPUTS * tile.warpgroups


def _kernel_of(weight: Int4Weight, tile: CudaTile) -> Kernel:
    return kernel(type(tile).kernel, defines_of(weight, tile), weight.codes.device)


@functools.cache
def _left(device: torch.device) -> Left:
    """Made before any graph is captured."""
    number = num_multiprocessors(device)
    sums = torch.empty(number * LEFT_SUMS, dtype=torch.float32, device=device)
    return Left(sums, torch.zeros(number * LEFT_FLAGS, dtype=torch.int32, device=device))
