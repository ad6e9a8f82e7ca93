"""Paged attention by the compiled CPU kernels.

Shapes: R rows, T tokens of the step, W pages in the widest table, H query heads and G key-value heads, D dims of a
head, N pages, P tokens in a page; pages are ``[N, 2, G, P, D]``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from plait_kernels.attention.cpu import CpuRows, HeadSizes, by_token
from plait_kernels.cpu import library as cpu


@dataclass(frozen=True, slots=True)
class PagedHeads:
    """The shape of a model's attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    """Even in bfloat16."""
    scale: float
    page_size: int

    @property
    def sizes(self) -> HeadSizes:
        """Keys and values are as wide."""
        return HeadSizes(self.num_heads, self.num_kv_heads, self.head_dim, self.head_dim, self.scale)


class PagedRows(CpuRows):
    """One step's rows: row r has ``lengths[r]`` new tokens after ``starts[r]`` of context."""

    def __init__(self, heads: PagedHeads, starts: Sequence[int], lengths: Sequence[int], page_table_RW: Tensor) -> None:
        """``page_table_RW`` int32, contiguous, on the CPU, and wide enough for every row."""
        super().__init__(heads.sizes, starts, lengths, page_table_RW, heads.page_size)
        self._head_stride = heads.page_size * heads.head_dim
        self._half = heads.num_kv_heads * self._head_stride

    def store(self, k_TGD: Tensor, v_TGD: Tensor, pages: Tensor) -> None:
        """Write the step's keys and values, of the dtype of the pages, into the pages of their rows.

        Raises ``ValueError`` if they are of another dtype, number or width.
        """
        for given in (k_TGD, v_TGD):
            self.expect_heads(given, pages.dtype, self.sizes.num_kv_heads, self.sizes.key_dim)
        k_TGD, v_TGD = by_token(k_TGD), by_token(v_TGD)
        kind = cpu.TYPES[pages.dtype]
        keys, values = (k_TGD.data_ptr(), k_TGD.stride(0)), (v_TGD.data_ptr(), v_TGD.stride(0))
        self.library.plait_store_kv(self.reference, *keys, *values, kind, pages.data_ptr())

    def attend(self, q_THD: Tensor, pages: Tensor) -> Tensor:
        """Causal attention over each row: ``out_THD`` in the dtype of the pages."""
        first = pages.data_ptr()
        strides = (2 * self._half, self.sizes.key_dim, self._head_stride)
        keys, values = (cpu.KvView(first + skipped * pages.itemsize, *strides) for skipped in (0, self._half))
        out_THD = torch.empty(q_THD.shape, dtype=pages.dtype)
        self.attend_to(q_THD, keys, values, out_THD)
        return out_THD


def can_attend(num_heads: int, num_kv_heads: int, head_dim: int, like: Tensor) -> bool:
    """Whether the kernels are there and take pages of this device and type, and heads of this shape."""
    even = like.dtype != torch.bfloat16 or head_dim % 2 == 0
    return even and num_heads % num_kv_heads == 0 and cpu.supports_tensors(like)
