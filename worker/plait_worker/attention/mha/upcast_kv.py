"""Upcast KV copies: float8 pages in the queries' type, for prefill kernels that read no other.

On an H200 with 32 query and 8 KV heads, a prompt of 8,192 tokens takes 1,002 us with FMHAv2 and a copy, and 2,475 us
with our kernel, which reads float8; 2,048 tokens after 30,000 take 1,747 and 4,972 us. The copy is bounded. Steps with
more context go without, and so do captured steps, whose lengths the host does not know.

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
"""Largest context that is copied: 134 MB in bfloat16 with 8 heads of 128."""
_TABLE_STEP = 4


@dataclass(frozen=True, slots=True)
class UpcastKv:
    """Where a step's prefill rows lie in the cache and in the copy."""

    page_I: Tensor
    """int64: the pages, one row after the other."""
    table_PW: Tensor
    """int32: each row's pages in the copy, padded with any page."""

    def gather(self, pages: Tensor, dtype: torch.dtype) -> Tensor:
        """The copy ``[I, 2, G, P, D]``, not multiplied by the scales."""
        return as_bytes(pages).index_select(0, self.page_I).view(pages.dtype).to(dtype)


def upcast_kv(rows: Rows, page_size: int) -> UpcastKv | None:
    """The copy for a step's prefill rows; None without such rows, and above ``MAX_TOKENS``."""
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
