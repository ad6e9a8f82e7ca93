"""Cached context of a step's prefill rows in pieces of bounded size, each over neighbouring rows.

Shapes: R rows of the step, I cached tokens of a piece, W pages in the widest row's table.
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
    """Some of the cached tokens of rows ``first .. first + len(lengths)``, row after row."""

    first: int
    """The first row."""
    begins: Ints
    """Position of each row's first cached token in the piece."""
    lengths: Ints
    """Cached tokens of each row, none for a row that caches nothing; their sum is I."""

    @property
    def rows(self) -> slice:
        """The piece's rows."""
        return slice(self.first, self.first + len(self.lengths))

    def slot_mapping(self, table_RW: Tensor, page_size: int, tile: int = 1) -> Tensor:
        """int64 ``[I]``, on the table's device: where in the flat cache ``[pages * page_size, C]`` the tokens lie.

        The first of them fills up what I lacks of a multiple of ``tile``.
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
    """All cached tokens of rows with ``contexts`` tokens each, in order, at most ``limit`` a piece."""
    ends = np.cumsum(contexts)
    total = int(ends[-1]) if len(ends) else 0
    for begin in range(0, total, limit):
        end = min(begin + limit, total)
        first = int(np.searchsorted(ends, begin, side="right"))
        last = int(np.searchsorted(ends, end, side="left")) + 1
        starts = ends[first:last] - np.array(contexts[first:last])
        begins = np.maximum(begin - starts, 0)
        yield ContextChunk(first, begins, np.minimum(ends[first:last], end) - starts - begins)


def even_chunks(contexts_R: Ints, room: int, limit: int) -> Iterator[Ints]:
    """How much of each row's context each piece of a captured step holds: all of the rows, ``limit`` tokens a piece.

    There are as many pieces as ``room`` tokens need; the last may hold nothing of anybody.
    """
    ends_R = contexts_R.cumsum()
    for begin in range(0, room, limit):
        end = min(begin + limit, room)
        yield np.clip(ends_R, begin, end) - np.clip(ends_R - contexts_R, begin, end)


def filled(num_tokens: int, num_rows: int, lengths: Sequence[int]) -> Ints:
    """New tokens of each row of a captured step: what fills it up is divided among the rows that it lacks."""
    num, rest = len(lengths), num_tokens - sum(lengths)
    ends_of_rest = np.linspace(0, rest, num_rows - num + 1).astype(np.int64)
    return np.concatenate((np.array(lengths, dtype=np.int64), np.diff(ends_of_rest)))


def load_latents(pages: Tensor, slot_mapping_I: Tensor, shape: MlaShape) -> Tensor:
    """What lies at these tokens (int64) of ``pages`` ``[N, P, C]``, ``[I, C]`` in the model's dtype."""
    read_IC = as_bytes(pages).view(-1, shape.cached_dim).index_select(0, slot_mapping_I)
    return as_model(read_IC.view(pages.dtype), shape)


def as_model(cached: Tensor, shape: MlaShape) -> Tensor:
    """Numbers of the pages in the model's dtype."""
    return (cached.float() * shape.cached_scale).to(shape.dtype) if shape.cached_dtype == FP8 else cached
