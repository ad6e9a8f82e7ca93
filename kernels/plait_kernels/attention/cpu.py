"""Rows of queries as the compiled CPU kernels see them; keys and values may lie anywhere.

Shapes: R rows, T tokens of the step, W pages in the widest table, H query heads; dims of a head: E of a query and
key, V in a value.
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
"""Query tokens times heads of a group that share each key packed into panels."""


@dataclass(frozen=True, slots=True)
class HeadSizes:
    """Counts and widths of heads."""

    num_heads: int
    num_kv_heads: int
    """A divisor of H."""
    key_dim: int
    """E: even in bfloat16."""
    value_dim: int
    scale: float
    """Factor of the scores before the softmax."""


class CpuRows:
    """Row r has ``lengths[r]`` tokens; each sees the positions up to its own, and none from ``ends[r]`` on."""

    def __init__(
        self,
        sizes: HeadSizes,
        starts: Sequence[int],
        lengths: Sequence[int],
        page_table_RW: Tensor,
        page_size: int,
        ends: Sequence[int] | None = None,
    ) -> None:
        """``starts`` are the positions of the rows' first tokens; without ``ends`` a row sees all its tokens.

        ``page_table_RW`` int32, contiguous, on the CPU, and wide enough for every position that is seen.
        """
        cpu.check_tensor(page_table_RW, torch.int32)
        self.sizes = sizes
        self._starts = np.array(starts, dtype=np.int64)
        lengths_R = np.array(lengths, dtype=np.int64)
        self._ends = self._starts + lengths_R if ends is None else np.array(ends, dtype=np.int64)
        self._first_tokens = np.zeros(len(starts) + 1, dtype=np.int64)
        np.cumsum(lengths_R, out=self._first_tokens[1:])
        self.num_tokens = int(self._first_tokens[-1])
        """T."""
        self._table = page_table_RW
        self._query_tiles = _query_tiles(sizes, self._starts, lengths_R)
        self.struct = cpu.Rows(
            starts=self._starts.ctypes.data,
            ends=self._ends.ctypes.data,
            first_tokens=self._first_tokens.ctypes.data,
            table=page_table_RW.data_ptr(),
            query_tiles=self._query_tiles.ctypes.data,
            num_rows=len(starts),
            num_query_tiles=len(self._query_tiles),
            table_width=page_table_RW.shape[1],
            page_size=page_size,
            num_heads=sizes.num_heads,
            num_kv_heads=sizes.num_kv_heads,
            key_dim=sizes.key_dim,
            value_dim=sizes.value_dim,
            scale=sizes.scale,
        )
        """For kernels that do more than attend."""
        self.reference = ctypes.byref(self.struct)
        self.library = cpu.library()

    def attend_to(
        self, q_THE: Tensor, keys: cpu.KvView, values: cpu.KvView, out_THV: Tensor, lse_TH: Tensor | None = None
    ) -> None:
        """Write ``out_THV``, of the dtype of keys and values, and ``lse_TH``, float32, both contiguous.

        The log-sum-exp is base 2; a token that sees nothing gets 0 and -inf.
        Raises ``ValueError`` if queries are of another dtype, number or width.
        """
        self.expect_heads(q_THE, out_THV.dtype, self.sizes.num_heads, self.sizes.key_dim)
        q_THE = by_token(q_THE)
        lse = None if lse_TH is None else lse_TH.data_ptr()
        queries = (q_THE.data_ptr(), q_THE.stride(0))
        kind = cpu.TYPES[out_THV.dtype]
        self.library.plait_attention(self.reference, *queries, keys, values, kind, out_THV.data_ptr(), lse)

    def expect_heads(self, x_THE: Tensor, dtype: torch.dtype, num_heads: int, width: int) -> None:
        """Raise ``ValueError`` unless each of the step's tokens has so many heads of this type and width."""
        cpu.check_tensor(x_THE, dtype, self.num_tokens, num_heads, width)


def by_token(x_THE: Tensor) -> Tensor:
    """The tensor itself if each token's heads are contiguous, else a copy."""
    width = x_THE.shape[2]
    return x_THE if x_THE.stride()[1:] == (width, 1) else x_THE.contiguous()


def _query_tiles(sizes: HeadSizes, starts_R: NDArray[np.int64], lengths_R: NDArray[np.int64]) -> NDArray[np.int32]:
    """(row, first query, number of queries) of each item of work, the longest first: ``[query_tiles, 3]``."""
    height = max(1, _TILE_HEADS // (sizes.num_heads // sizes.num_kv_heads))
    counts_R = -(-lengths_R // height)
    rows = np.repeat(np.arange(len(lengths_R)), counts_R)
    firsts = (np.arange(len(rows)) - np.repeat(np.cumsum(counts_R) - counts_R, counts_R)) * height
    counts = np.minimum(lengths_R[rows] - firsts, height)
    order = np.argsort(-(starts_R[rows] + firsts + counts) * counts, kind="stable")
    return np.ascontiguousarray(np.stack((rows, firsts, counts), axis=1)[order], dtype=np.int32)
