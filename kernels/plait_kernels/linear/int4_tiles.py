"""Which kernel multiplies so many rows by 4-bit weights, and with what tile.

On Hopper GPUs kernels in CUDA C++ multiply integers where they were measured and faster (``gemm_tuning_DEVICE.json``);
else it is Triton's kernel. With more rows it is faster to de-quantise the matrix and to multiply in bfloat16.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from plait_kernels.linear import cuda_gemm
from plait_kernels.linear.cuda_gemm import CompiledTile
from plait_kernels.linear.gemm_tuning import Tile, int4_tiles_of, numbers_by_rows, tuning_table
from plait_kernels.linear.int4 import FLOAT, Int4Weight

CUDA_MAX_ROWS = 1, 8, 16, 32, 64, 128, 256, 512, 2048
"""The numbers of rows that are measured; a tile serves up to so many."""
_SKINNY_NUMBERS = 4
"""Of a skinny tile in the table; others have one more."""


@dataclass(frozen=True, slots=True)
class SkinnyTile(CompiledTile):
    """A tile of ``int4_skinny_gemm.cu``, for up to 8 rows."""

    tiles: int
    """Of 16 outputs, that a block has at a time."""
    warps: int
    """That share the inputs."""
    ahead: int
    """Chunks of codes that a warp reads ahead."""
    blocks: int
    """That are to fit a multiprocessor."""

    kernel: ClassVar[str] = "int4_skinny_gemm"


@dataclass(frozen=True, slots=True)
class WgmmaTile(CompiledTile):
    """A tile of ``int4_wgmma_gemm.cu``."""

    rows: int
    """16, 32, 64, 128 or 256."""
    warpgroups: int
    """Of 64 outputs each."""
    slots: int
    """Chunks of inputs in shared memory; fewer, if marks of small groups take the place."""
    blocks: int
    """On a multiprocessor."""
    splits: int
    """Blocks that share the inputs of a tile, up to 8; 0: as many as fit the GPU share those of all tiles evenly."""

    kernel: ClassVar[str] = "int4_wgmma_gemm"


CudaTile = SkinnyTile | WgmmaTile
Int4Tile = Tile | CudaTile


def tiles_of(weight: Int4Weight) -> dict[int, Int4Tile]:
    """For each number of rows that is multiplied by 4 bits, its tile."""
    device, tiles = weight.codes.device, dict[int, Int4Tile](int4_tiles_of(weight))
    if cuda_unsupported_reason(weight) is None:
        names = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
        tiles |= cuda_tiles_in(tuning_table(*names).get(cuda_key(weight), {}))
    return tiles


def cuda_unsupported_reason(weight: Int4Weight) -> str | None:
    """Why a matrix is not multiplied by the CUDA kernels; None if it is."""
    if weight.kind == FLOAT:
        return "its codes are floats"
    return cuda_gemm.unsupported_reason(weight.codes.device)


def cuda_key(weight: Int4Weight) -> str:
    """Of its tiles in the table."""
    num_outputs, num_inputs = weight.shape
    return f"cuda {weight.kind} {num_outputs}x{num_inputs}"


def cuda_tiles_in(by_max_rows: Mapping[str, Sequence[int]]) -> dict[int, Int4Tile]:
    """For each number of rows, from those of the most rows."""
    found = numbers_by_rows(by_max_rows, CUDA_MAX_ROWS, 1)
    return {rows: _tile_of(numbers) for rows, numbers in found.items()}


def _tile_of(numbers: Sequence[int]) -> CudaTile:
    return (SkinnyTile if len(numbers) == _SKINNY_NUMBERS else WgmmaTile)(*numbers)
