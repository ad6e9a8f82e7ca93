"""Cached context of a step's prefill rows, in chunks of bounded size over consecutive rows.

Shapes: R rows of the step, I cached tokens of a chunk, W pages in the widest row's table; N pages of P tokens, C
elements cached of a token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from plait_kernels.kv_cache import FP8, as_bytes
from torch import Tensor

from plait_worker.attention.lengths import Ints
from plait_worker.attention.spec import MlaShape
from plait_worker.transfer import upload


@dataclass(frozen=True, slots=True)
class ContextChunk:
    """Cached tokens of rows ``first .. first + len(lengths)``, one row after the other."""

    first: int
    """The first row."""
    begins: Ints
    """Position of each row's first cached token in the chunk."""
    lengths: Ints
    """Cached tokens of each row, possibly 0; their sum is I."""

    @property
    def rows(self) -> slice:
        """The chunk's rows."""
        return slice(self.first, self.first + len(self.lengths))

    def slot_mapping(self, table_RW: Tensor, page_size: int, tile: int = 1) -> Tensor:
        """int64 ``[I]`` on the table's device: indices of the tokens in the flat cache ``[pages * page_size, C]``.

        Padded to a multiple of ``tile`` with the first.
        """
        row_I = np.repeat(np.arange(len(self.lengths)), self.lengths)
        before = self.lengths.cumsum() - self.lengths
        position_I = np.arange(int(self.lengths.sum())) + np.repeat(self.begins - before, self.lengths)
        fill = -len(row_I) % tile
        row_I, position_I = (np.concatenate((each, each[:1].repeat(fill))) for each in (row_I, position_I))
        entry_I = (self.first + row_I) * table_RW.shape[1] + position_I // page_size
        page_I = table_RW.flatten()[upload(entry_I, table_RW.device)].long()
        return page_I * page_size + upload(position_I % page_size, table_RW.device)


def context_chunks(contexts: Sequence[int], limit: int) -> Iterator[ContextChunk]:
    """All cached tokens of rows with these context lengths, in order, at most ``limit`` a chunk."""
    ends = np.cumsum(contexts)
    total = int(ends[-1]) if len(ends) else 0
    for begin in range(0, total, limit):
        end = min(begin + limit, total)
        first = int(np.searchsorted(ends, begin, side="right"))
        last = int(np.searchsorted(ends, end, side="left")) + 1
        starts = ends[first:last] - np.array(contexts[first:last])
        begins = np.maximum(begin - starts, 0)
        yield ContextChunk(first, begins, np.minimum(ends[first:last], end) - starts - begins)


def even_chunks(contexts_R: Ints, capacity: int, limit: int) -> Iterator[Ints]:
    """For a captured step: how many cached tokens of each row each chunk holds. All chunks cover all rows.

    There are as many chunks of ``limit`` tokens as ``capacity`` needs; the last may be empty.
    """
    ends_R = contexts_R.cumsum()
    for begin in range(0, capacity, limit):
        end = min(begin + limit, capacity)
        yield np.clip(ends_R, begin, end) - np.clip(ends_R - contexts_R, begin, end)


def padded_lengths(num_tokens: int, num_rows: int, lengths: Sequence[int]) -> Ints:
    """New tokens of each row of a captured step; unused rows share the padding tokens."""
    num, rest = len(lengths), num_tokens - sum(lengths)
    ends_of_rest = np.linspace(0, rest, num_rows - num + 1).astype(np.int64)
    return np.concatenate((np.array(lengths, dtype=np.int64), np.diff(ends_of_rest)))


def load_latents(pages: Tensor, slot_mapping_I: Tensor, shape: MlaShape) -> Tensor:
    """The tokens at these indices (int64) of ``pages`` ``[N, P, C]``: ``[I, C]`` in the model's dtype."""
    read_IC = as_bytes(pages).view(-1, shape.cached_dim).index_select(0, slot_mapping_I)
    return to_model_dtype(read_IC.view(pages.dtype), shape)


def to_model_dtype(cached: Tensor, shape: MlaShape) -> Tensor:
    """Cached elements in the model's dtype."""
    return (cached.float() * shape.cached_scale).to(shape.dtype) if shape.cached_dtype == FP8 else cached
