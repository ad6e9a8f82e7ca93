"""Attention straight over the pages of a cache, by the compiled CPU kernels.

Shapes: R rows, T tokens of the step, W pages in the widest table, H query heads and G key-value heads, D numbers in a
head, N pages, P tokens in a page; pages are ``[N, 2, G, P, D]``.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from plait_kernels.cpu import library as cpu

_TILE_HEADS = 192
"""Query tokens times the heads of a group that share each key put into panels."""


@dataclass(frozen=True, slots=True)
class PagedHeads:
    """What the kernels know of a model's attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    """Even in bfloat16."""
    scale: float
    page_size: int


class PagedRows:
    """One step's rows: row r has ``lengths[r]`` new tokens behind ``starts[r]`` of context."""

    def __init__(self, heads: PagedHeads, starts: Sequence[int], lengths: Sequence[int], page_table_RW: Tensor) -> None:
        """``page_table_RW`` int32, contiguous, on the CPU, and wide enough for every row."""
        self._starts = np.array(starts, dtype=np.int64)
        self._first_tokens = np.zeros(len(starts) + 1, dtype=np.int64)
        np.cumsum(lengths, out=self._first_tokens[1:])
        self._table = page_table_RW
        self._pieces = _pieces(heads, self._starts, np.array(lengths, dtype=np.int64))
        self.struct = cpu.Rows(
            starts=self._starts.ctypes.data,
            first_tokens=self._first_tokens.ctypes.data,
            table=page_table_RW.data_ptr(),
            pieces=self._pieces.ctypes.data,
            num_rows=len(starts),
            num_pieces=len(self._pieces),
            table_width=page_table_RW.shape[1],
            page_size=heads.page_size,
            num_heads=heads.num_heads,
            num_kv_heads=heads.num_kv_heads,
            head_dim=heads.head_dim,
            scale=heads.scale,
        )
        """For kernels that do more than attend."""
        self._reference = ctypes.byref(self.struct)
        self._library = cpu.library()

    def store(self, k_TGD: Tensor, v_TGD: Tensor, pages: Tensor) -> None:
        """Write the step's keys and values into the pages of their rows."""
        k_TGD, v_TGD = _by_token(k_TGD), _by_token(v_TGD)
        kind = cpu.TYPES[pages.dtype]
        keys, values = (k_TGD.data_ptr(), k_TGD.stride(0)), (v_TGD.data_ptr(), v_TGD.stride(0))
        self._library.plait_store(self._reference, *keys, *values, kind, pages.data_ptr())

    def attend(self, q_THD: Tensor, pages: Tensor) -> Tensor:
        """Each token attends to all before it in its row and to itself: ``out_THD`` in the dtype of the pages."""
        q_THD = _by_token(q_THD)
        out_THD = torch.empty(q_THD.shape, dtype=pages.dtype)
        kind = cpu.TYPES[pages.dtype]
        self._library.plait_attend(
            self._reference, q_THD.data_ptr(), q_THD.stride(0), pages.data_ptr(), kind, out_THD.data_ptr()
        )
        return out_THD


def can_attend(num_heads: int, num_kv_heads: int, head_dim: int, like: Tensor) -> bool:
    """Whether the kernels are there and take pages of this device and type, and heads of this shape."""
    even = like.dtype != torch.bfloat16 or head_dim % 2 == 0
    return even and num_heads % num_kv_heads == 0 and cpu.takes(like)


def _pieces(heads: PagedHeads, starts_R: NDArray[np.int64], lengths_R: NDArray[np.int64]) -> NDArray[np.int32]:
    """(row, first query, number of queries) of each piece of work, the longest first: ``[pieces, 3]``."""
    height = max(1, _TILE_HEADS // (heads.num_heads // heads.num_kv_heads))
    counts_R = -(-lengths_R // height)
    rows = np.repeat(np.arange(len(lengths_R)), counts_R)
    firsts = (np.arange(len(rows)) - np.repeat(np.cumsum(counts_R) - counts_R, counts_R)) * height
    sizes = np.minimum(lengths_R[rows] - firsts, height)
    order = np.argsort(-(starts_R[rows] + firsts + sizes) * sizes, kind="stable")
    return np.ascontiguousarray(np.stack((rows, firsts, sizes), axis=1)[order], dtype=np.int32)


def _by_token(x_THD: Tensor) -> Tensor:
    """The tensor itself where each token's heads lie together."""
    head_dim = x_THD.shape[2]
    return x_THD if x_THD.stride()[1:] == (head_dim, 1) else x_THD.contiguous()
