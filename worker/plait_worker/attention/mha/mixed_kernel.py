"""Steps for which one prefill kernel over all rows was faster than separate kernels, on an H200.

A backend that is not in the table always uses separate kernels. Captured steps cannot ask: a graph does not know the
KV lengths, and in a skewed batch one kernel over all rows takes several times as long.

`tests/bench/gpu/mixed_kernel.py` makes the table from `tests/bench/results/gpu-mixed-attention.json`.
"""

from __future__ import annotations

import functools
import json
from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path

from plait_worker.attention.spec import MhaShape
from plait_worker.rows import Rows

TABLE = Path(__file__).with_name("mixed_kernel.json")
DECODE_ROWS, LONGEST, MEAN_KV_LENGTHS = (1, 4, 16, 64, 256), (64, 256, 1024, 4096), (128, 1024, 8192)
"""The measured grid: decode rows, new tokens of the longest prefill row, mean KV length of the decode rows."""
MOST_GROUP = 8
"""Largest GQA group measured. The prefill kernel reads keys once a query head, the decode kernel once a group."""

Kind = tuple[int, int, int]
"""The step's three sizes, each rounded up to the grid."""


def prefers_mixed_kernel(backend: str, shape: MhaShape, rows: Rows) -> bool:
    """Whether one kernel over all rows was faster for such steps; False unless there are prefill and decode rows."""
    kind = kind_of(rows)
    return (
        kind is not None
        and shape.num_heads <= MOST_GROUP * shape.num_kv_heads
        and kind in _load_measured_table().get(backend, ())
    )


def kind_of(rows: Rows) -> Kind | None:
    """None without prefill or decode rows, and beyond the grid."""
    num = rows.num_prefill
    num_decode = rows.num_rows - num
    if num == 0 or num_decode == 0:
        return None
    mean_kv_length = sum(rows.starts[num:]) / num_decode + 1
    found = (
        _round_up_to_measured(DECODE_ROWS, num_decode),
        _round_up_to_measured(LONGEST, max(rows.lengths[:num])),
        _round_up_to_measured(MEAN_KV_LENGTHS, mean_kv_length),
    )
    return None if 0 in found else found


def _round_up_to_measured(measured: Sequence[int], value: float) -> int:
    """The smallest measured size that is no less; 0 if there is none."""
    at = bisect_left(measured, value)
    return measured[at] if at < len(measured) else 0


@functools.cache
def _load_measured_table() -> dict[str, set[Kind]]:
    """By backend."""
    table: dict[str, list[Kind]] = json.loads(TABLE.read_text())
    return {
        backend: {(rows, longest, kv_length) for rows, longest, kv_length in kinds} for backend, kinds in table.items()
    }
