"""Which kernel multiplies so many rows by FP8 weights, and with what tile.

On Hopper GPUs kernels in CUDA C++ do for up to 256 where they were measured and faster (``gemm_tuning_DEVICE.json``).
Else it is Triton's for up to 64 rows, and cuBLASLt for more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from plait_kernels.linear import cuda_gemm
from plait_kernels.linear.cuda_gemm import CompiledTile
from plait_kernels.linear.fp8 import Fp8Weight
from plait_kernels.linear.gemm_tuning import Tile, fp8_key, fp8_tiles_of, numbers_by_rows, tuning_table

CUDA_MAX_ROWS = 1, 8, 16, 32, 64
"""The numbers of rows that are measured; a tile serves up to so many, and one row has a kernel of its own."""
TMA_MAX_ROWS = 64, 128, 256
"""The same of ``Fp8TmaTile``; the first serves those above 32."""
_TMA_LEAST_ROWS = 33


@dataclass(frozen=True, slots=True)
class Fp8RowTile(CompiledTile):
    """A tile of ``fp8_row_gemm.cu``, for one row."""

    tiles: int
    """Of 16 outputs, that a block has at a time: even for gates."""
    warps: int
    """That share the inputs."""
    ahead: int
    """Chunks of weights that a warp copies ahead."""

    kernel: ClassVar[str] = "fp8_row_gemm"


@dataclass(frozen=True, slots=True)
class Fp8WgmmaTile(CompiledTile):
    """A tile of ``fp8_wgmma_gemm.cu``."""

    rows: int
    """8, 16, 32, 64 or 128."""
    warpgroups: int
    """Of 64 outputs each."""
    stages: int
    """Of 128 inputs, in shared memory."""
    blocks: int
    """That are to fit a multiprocessor."""
    splits: int
    """Blocks that share the inputs, up to 8."""

    kernel: ClassVar[str] = "fp8_wgmma_gemm"


@dataclass(frozen=True, slots=True)
class Fp8TmaTile(CompiledTile):
    """A tile of ``fp8_tma_gemm.cu``."""

    rows: int
    """64, 128 or, without blocks of weights, 256."""
    warpgroups: int
    """Of 64 outputs each."""
    stages: int
    """Of 128 inputs, in shared memory."""
    splits: int
    """Blocks that share the inputs, up to 8."""

    kernel: ClassVar[str] = "fp8_tma_gemm"


Fp8GemmTile = Fp8WgmmaTile | Fp8TmaTile
Fp8CudaTile = Fp8RowTile | Fp8GemmTile


def row_tile_of(weight: Fp8Weight) -> Fp8RowTile | None:
    """For one row that is not rounded; None if it is multiplied by Triton's GEMV."""
    tile = _measured(weight).get(1)
    return tile if isinstance(tile, Fp8RowTile) else None


def tiles_of(weight: Fp8Weight) -> dict[int, Tile | Fp8GemmTile]:
    """For each number of rows from 2 on that our kernels multiply, its tile."""
    tiles = dict[int, Tile | Fp8GemmTile](fp8_tiles_of(weight))
    return tiles | {rows: tile for rows, tile in _measured(weight).items() if isinstance(tile, Fp8GemmTile)}


def gate_tiles_of(gate_up: Fp8Weight) -> dict[int, Fp8WgmmaTile]:
    """For each number of rows from 2 on whose GEMM also applies the gates, its tile."""
    tiles = {rows: tile for rows, tile in _measured_cuda(gate_up).items() if isinstance(tile, Fp8WgmmaTile)}
    return {rows: tile for rows, tile in tiles.items() if can_gate(gate_up, tile)}


def _measured(weight: Fp8Weight) -> dict[int, Fp8CudaTile]:
    return {**_measured_cuda(weight), **tma_tiles_in(_numbers(weight, tma_key(weight)))}


def _measured_cuda(weight: Fp8Weight) -> dict[int, Fp8RowTile | Fp8WgmmaTile]:
    return cuda_tiles_in(_numbers(weight, cuda_key(weight)))


def _numbers(weight: Fp8Weight, key: str) -> Mapping[str, Sequence[int]]:
    """Of the table; none where the kernels do not run."""
    if cuda_unsupported_reason(weight) is not None:
        return {}
    device = weight.stored_OI.device
    return tuning_table(torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)).get(key, {})


def cuda_unsupported_reason(weight: Fp8Weight) -> str | None:
    """Why a matrix is not multiplied by the CUDA kernels; None if it is."""
    return cuda_gemm.unsupported_reason(weight.stored_OI.device)


def cuda_key(weight: Fp8Weight) -> str:
    """Of its tiles in the table."""
    return f"cuda {fp8_key(weight)}"


def cuda_tiles_in(by_max_rows: Mapping[str, Sequence[int]]) -> dict[int, Fp8RowTile | Fp8WgmmaTile]:
    """For each number of rows, from those of the most rows."""
    found = numbers_by_rows(by_max_rows, CUDA_MAX_ROWS, 1)
    return {rows: (Fp8RowTile if rows == 1 else Fp8WgmmaTile)(*numbers) for rows, numbers in found.items()}


def tma_key(weight: Fp8Weight) -> str:
    """The same of ``Fp8TmaTile``."""
    return f"tma {fp8_key(weight)}"


def tma_tiles_in(by_max_rows: Mapping[str, Sequence[int]]) -> dict[int, Fp8TmaTile]:
    """As ``cuda_tiles_in``."""
    found = numbers_by_rows(by_max_rows, TMA_MAX_ROWS, _TMA_LEAST_ROWS)
    return {rows: Fp8TmaTile(*numbers) for rows, numbers in found.items()}


def can_gate(weight: Fp8Weight, tile: Fp8RowTile | Fp8WgmmaTile) -> bool:
    """Whether a block's outputs may be as many gates, by their 16 or 8, as what those gate."""
    if isinstance(tile, Fp8WgmmaTile):
        return weight.shape[0] % 16 == 0
    return tile.tiles % 2 == 0 and weight.shape[0] % 32 == 0
