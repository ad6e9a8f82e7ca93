"""Which GEMMs of a few rows the skinny GEMM computes, and with what tile: those for which it beat cuBLAS.

``gemm_tuning_DEVICE.json`` has the measurements of one GPU, written there by ``tests/bench/gpu/gemm_tuning.py``. A GPU
without a table of its own uses that of its compute capability's measured GPU, or cuBLAS for everything.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from plait_kernels.linear.fp8 import Fp8Weight
from plait_kernels.linear.int4 import Int4Weight

MAX_TILES = 8192
_MEASURED = {(9, 0): "h200"}
"""The GPU whose table serves a compute capability, for GPUs that have none of their own."""
_MAX_ROWS = (16, 32, 64)
"""The numbers of rows that tiles are tuned for; each tile serves up to so many."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Sizes of a tile, and the number of programs that split its inputs (split-K)."""

    outputs: int
    inputs: int
    splits: int
    num_stages: int
    num_warps: int

    def fits_matrix(self, num_outputs: int, num_inputs: int) -> bool:
        """Whether a matrix consists of whole tiles."""
        is_whole = num_outputs % self.outputs == 0 and num_inputs % (self.inputs * self.splits) == 0
        return is_whole and num_outputs // self.outputs <= MAX_TILES


def tiles_of(weight_OI: Tensor) -> dict[int, Tile]:
    """For each number of rows from 2 on that the skinny GEMM computes for this matrix, its tile."""
    if weight_OI.dtype != torch.bfloat16 or not weight_OI.is_cuda:
        return {}
    device = weight_OI.device
    return tiles_for(torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device), *weight_OI.shape)


def tiles_for(device_name: str, capability: tuple[int, int], num_outputs: int, num_inputs: int) -> dict[int, Tile]:
    """The same for a bfloat16 matrix on a GPU of this name and compute capability."""
    return _tiles_in(tuning_table(device_name, capability).get(f"{num_outputs}x{num_inputs}", {}))


def _tiles_in(
    by_max_rows: Mapping[str, Sequence[int]], max_rows: Sequence[int] = _MAX_ROWS, least: int = 2
) -> dict[int, Tile]:
    """For each number of rows from ``least`` on, from those of the most rows."""
    return {rows: Tile(*numbers) for rows, numbers in numbers_by_rows(by_max_rows, max_rows, least).items()}


def numbers_by_rows(
    by_max_rows: Mapping[str, Sequence[int]], max_rows: Sequence[int], least: int
) -> dict[int, Sequence[int]]:
    """A tile's numbers for each number of rows from ``least`` on: those of the next of ``max_rows``, if it has any."""
    found = dict[int, Sequence[int]]()
    for most in max_rows:
        if numbers := by_max_rows.get(str(most)):
            found |= dict.fromkeys(range(least, most + 1), numbers)
        least = most + 1
    return found


FP8_TILE = Tile(128, 128, 1, 3, 8)
"""For matrices and numbers of rows that cuBLASLt does not take."""
_FEW_PROGRAMS = 264
"""Two for each multiprocessor of an H200."""


def fp8_tiles_of(weight: Fp8Weight) -> dict[int, Tile]:
    """For each number of rows from 2 to 64, the tile of our FP8 GEMM: measured, or by the number of programs."""
    device = weight.stored_OI.device
    found = dict.fromkeys(range(2, _MAX_ROWS[-1] + 1), _fp8_tile(*weight.shape))
    if device.type == "cuda":
        names = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
        found |= _tiles_in(tuning_table(*names).get(fp8_key(weight), {}))
    return found


def fp8_key(weight: Fp8Weight) -> str:
    """Of its tiles in the table."""
    num_outputs, num_inputs = weight.shape
    return f"{'fp8 blocks' if weight.block_rows else 'fp8'} {num_outputs}x{num_inputs}"


def _fp8_tile(num_outputs: int, num_inputs: int) -> Tile:
    splits = 1
    while splits < 8 and num_outputs // 64 * splits < _FEW_PROGRAMS and num_inputs % (256 * splits) == 0:
        splits *= 2
    return Tile(64, 128, splits, 4, 4)


_INT4_MAX_ROWS = (1, 8, 16, 64, 256)
"""The numbers of rows that are measured; where the table has none of them, matrices are de-quantised."""
_INT4_WIDE = Tile(128, 128, 1, 3, 8)


def int4_tiles_of(weight: Int4Weight) -> dict[int, Tile]:
    """For each number of rows that is multiplied by 4 bits, the tile: measured, or by the number of programs.

    With more rows it is faster to de-quantise the matrix and to multiply in bfloat16.
    """
    device, table = weight.codes.device, dict[str, list[int]]()
    if device.type == "cuda":
        names = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
        table = tuning_table(*names).get(int4_key(weight), {})
    return _tiles_in(table or _int4_guess(*weight.shape), _INT4_MAX_ROWS, 1)


def int4_key(weight: Int4Weight) -> str:
    """Of its tiles in the table."""
    num_outputs, num_inputs = weight.shape
    return f"{weight.kind} {num_outputs}x{num_inputs}"


def _int4_guess(num_outputs: int, num_inputs: int) -> dict[str, list[int]]:
    few = _split(Tile(64, 256, 1, 4, 4), num_outputs, num_inputs)
    some = _split(Tile(128, 128, 1, 3, 8), num_outputs, num_inputs)
    tiles = (few, few, few, some, _INT4_WIDE)
    return {f"{most}": list(astuple(tile)) for most, tile in zip(_INT4_MAX_ROWS, tiles, strict=True)}


def _split(tile: Tile, num_outputs: int, num_inputs: int) -> Tile:
    """Among more programs while there are too few, each with four steps or more."""
    splits = 1
    while (
        splits < 8
        and num_outputs // tile.outputs * splits < _FEW_PROGRAMS
        and num_inputs % (2 * splits * tile.inputs) == 0
        and num_inputs // (2 * splits * tile.inputs) >= 2
    ):
        splits *= 2
    return replace(tile, splits=splits)


def tuning_file(device_name: str) -> Path:
    """Where the table of the GPU with this name is, or would be: of "NVIDIA H100 80GB HBM3" gemm_tuning_h100.json."""
    words = re.split(r"[ -]+", device_name.lower().removeprefix("nvidia "))
    model = next((index + 1 for index, word in enumerate(words) if re.search(r"\d", word)), len(words))
    return Path(__file__).with_name(f"gemm_tuning_{'_'.join(words[:model])}.json")


@functools.cache
def tuning_table(device_name: str, capability: tuple[int, int]) -> dict[str, dict[str, list[int]]]:
    """By outputs and inputs, then by the most rows; empty without a table for the name or the capability."""
    own = tuning_file(device_name)
    for path in (own, own.with_name(f"gemm_tuning_{_MEASURED.get(capability)}.json")):
        if path.exists():
            table: dict[str, dict[str, list[int]]] = json.loads(path.read_text())
            return table
    return {}
