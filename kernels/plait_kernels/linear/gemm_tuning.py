"""Which products of few rows our own kernel takes: those that it was faster at than cuBLAS, measured on an H200.

The table is what `tests/bench/gpu/gemm_tuning.py` writes; its times are in `tests/bench/results/gpu-few-rows.json`.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

TABLE = Path(__file__).with_name("gemm_tuning_h200.json")
MAX_TILES = 8192
_MEASURED_ON = (9, 0)


@dataclass(frozen=True, slots=True)
class Tile:
    """What a program reads at a time, and how many share the inputs of its outputs."""

    outputs: int
    inputs: int
    splits: int
    num_stages: int
    num_warps: int

    def takes(self, num_outputs: int, num_inputs: int) -> bool:
        """Whether a matrix consists of whole tiles."""
        is_whole = num_outputs % self.outputs == 0 and num_inputs % (self.inputs * self.splits) == 0
        return is_whole and num_outputs // self.outputs <= MAX_TILES


def tiles_of(weight_OI: Tensor) -> dict[int, Tile]:
    """For each number of rows from 2 on that our kernel takes for this matrix, its tile."""
    if weight_OI.dtype != torch.bfloat16 or torch.cuda.get_device_capability(weight_OI.device) != _MEASURED_ON:
        return {}
    by_most_rows = _table().get("x".join(map(str, weight_OI.shape)), {})
    least, found = 2, dict[int, Tile]()
    for most in _MOST_ROWS:
        if str(most) in by_most_rows:
            found |= dict.fromkeys(range(least, most + 1), Tile(*by_most_rows[str(most)]))
        least = most + 1
    return found


_MOST_ROWS = (16, 32, 64)
"""What the table tells apart: the rows that a tile has room for."""


@functools.cache
def _table() -> dict[str, dict[str, list[int]]]:
    """By outputs and inputs, then by the most rows."""
    table: dict[str, dict[str, list[int]]] = json.loads(TABLE.read_text())
    return table
