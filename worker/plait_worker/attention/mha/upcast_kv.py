"""Copies of float8 pages in the type of the queries, for prefill kernels that read no other.

On an H200, 32 query heads over 8: one prompt of 8,192 tokens takes FMHAv2 1,002 us over such a copy, and our kernel
that reads float8 itself 2,475 us; 2,048 tokens behind 30,000 take 1,747 and 4,972 us. The copy has a bound: steps with
more context, and captured ones, whose lengths the host does not know, go without.

Shapes: P prefill rows, W pages in the widest row's table, N pages, I pages of all prefill rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from plait_kernels.kv_cache import as_bytes
from torch import Tensor

from plait_worker.rows import Rows
from plait_worker.transfer import upload

MAX_TOKENS = 32_768
"""Of context that is copied at a time: 8 heads of 128 take 134 MB in bfloat16."""
_TABLE_STEP = 4


@dataclass(frozen=True, slots=True)
class UpcastKv:
    """Where the pages of a step's prefill rows lie, and where in the copy."""

    page_I: Tensor
    """int64: the pages, row after row."""
    table_PW: Tensor
    """int32: each row's pages in the copy; behind its end any."""

    def gather(self, pages: Tensor, dtype: torch.dtype) -> Tensor:
        """The copy, ``[I, 2, G, P, D]``; still divided by the scales."""
        return as_bytes(pages).index_select(0, self.page_I).view(pages.dtype).to(dtype)


def upcast_kv(rows: Rows, page_size: int) -> UpcastKv | None:
    """The copy that a step's prefill rows need; None where there are none, or where it would be too large."""
    num = rows.num_prefill
    if num == 0 or rows.device_lengths is not None:
        return None
    counts_P = -(-(np.array(rows.starts[:num]) + np.array(rows.lengths[:num])) // page_size)
    total = int(counts_P.sum())
    if total * page_size > MAX_TOKENS:
        return None
    firsts_P = counts_P.cumsum() - counts_P
    page_index_I = np.arange(total) - np.repeat(firsts_P, counts_P)
    flat_I = np.repeat(np.arange(num), counts_P) * rows.page_table_RW.shape[1] + page_index_I
    device = rows.page_table_RW.device
    width = int(counts_P.max()) + -int(counts_P.max()) % _TABLE_STEP
    table_PW = np.minimum(firsts_P[:, None] + np.arange(width), total - 1).astype(np.int32)
    page_I = rows.page_table_RW[:num].reshape(-1).index_select(0, upload(flat_I, device)).long()
    return UpcastKv(page_I, upload(table_PW, device))
