"""The lists of one step: which raw keys and entries each token sees, and which blocks its rows begin and close.

Raw keys have one index space a layer: the step's own first, in the order of its tokens, then the slots' rings. Entries
are rows of the layer's pages ``[(N + 1) P / ratio, width]``. An index of -1 is nothing.

Shapes: T tokens, R rows, W the window, G places of a ring, M entries of the longest row, S runs of a row's tokens in
one block, C those that close their block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from plait_worker.rows import Rows

Ints = npt.NDArray[np.int64]


class Copies(NamedTuple):
    """Rows to copy, by their indices."""

    source: Tensor
    target: Tensor


class RawLayout(NamedTuple):
    """Where raw keys lie."""

    num_staged: int
    """Places of the step's own, before the rings."""
    ring: int
    """G: the window, and the drafts of a row: a key that they replace would be seen again if they are rejected."""


@dataclass(frozen=True, slots=True)
class WindowLists:
    """Raw keys: the same lists for all layers."""

    index_TW: Tensor
    """int64: of each token's window, the token's own key last."""
    kept: Copies
    """From the step's keys to the rings, after the layer attended."""
    saved: Copies
    """From raw keys to the rings of snapshots ``[U G]``."""


def window_lists(rows: Rows, window: int, layout: RawLayout) -> WindowLists:
    """A token's window: its own key and those before it; position p is at place p % G of its slot's ring."""
    num_staged, ring = layout
    device = rows.positions_T.device
    starts_R, lengths_R, slots_R = (
        np.asarray(each, dtype=np.int64) for each in (rows.starts, rows.lengths, rows.slots)
    )
    firsts_R = np.cumsum(lengths_R) - lengths_R
    row_T = np.repeat(np.arange(len(lengths_R)), lengths_R)
    token_T = np.arange(len(row_T))
    position_T = starts_R[row_T] + token_T - firsts_R[row_T]
    back_W = np.arange(window) - (window - 1)
    at_TW = position_T[:, None] + back_W
    ring_TW = num_staged + slots_R[row_T][:, None] * ring + at_TW % ring
    index_TW = np.where(at_TW >= starts_R[row_T][:, None], token_T[:, None] + back_W, ring_TW)
    index_TW[at_TW < 0] = -1
    is_kept_T = position_T >= (starts_R + lengths_R)[row_T] - ring
    kept = token_T[is_kept_T], num_staged + (slots_R[row_T] * ring + position_T % ring)[is_kept_T]
    saved = [_saved(rows, save.row, save.position, layout) for save in rows.saves]
    units = [save.snapshot * ring + np.arange(ring) for save in rows.saves]
    return WindowLists(
        index_TW=torch.from_numpy(index_TW).to(device),
        kept=_copies(kept[0], kept[1], device),
        saved=_copies(np.concatenate([*saved, _NONE]), np.concatenate([*units, _NONE]), device),
    )


_NONE: Ints = np.zeros(0, dtype=np.int64)


def _saved(rows: Rows, row: int, position: int, layout: RawLayout) -> Ints:
    """Where the key of each place of the ring is, were ``position`` the next."""
    start, first, places_G = rows.starts[row], sum(rows.lengths[:row]), np.arange(layout.ring)
    at_G = position - 1 - (position - 1 - places_G) % layout.ring
    ring_G = layout.num_staged + rows.slots[row] * layout.ring + places_G
    saved_G: Ints = np.where(at_G >= start, first + at_G - start, ring_G)
    return saved_G


def _copies(source: Ints, target: Ints, device: torch.device) -> Copies:
    return Copies(torch.from_numpy(source).to(device), torch.from_numpy(target).to(device))


@dataclass(frozen=True, slots=True)
class BlockLists:
    """The blocks of one ratio that the step's tokens are in; a run is a row's tokens in one of them."""

    lengths_S: Tensor
    """int64: tokens of each run; they follow each other in T."""
    ape_T: Tensor
    """int64: place of each token in its block."""
    slots_S: Tensor
    continues_S: Tensor
    """bool: whether the block was begun in an earlier step."""
    closed_C: Tensor
    """int64: the runs that close their block, among S."""
    prior_C: Tensor
    """int64: the run that closed the block before; S + slot if that was in an earlier step."""
    has_prior_C: Tensor
    """bool: false for a request's first block."""
    place_C: Tensor
    """int64: row of the entry in the layer's pages."""
    first_C: Tensor
    """int64: position of the block's first token."""
    open: Copies
    """From runs that do not close their block to slots."""
    last: Copies
    """From each row's last closed run to its slot."""
    saved: Copies
    """From the closed runs that end where a snapshot is taken, to the snapshots."""

    @property
    def is_single(self) -> bool:
        """Whether every run is one token."""
        return len(self.ape_T) == len(self.lengths_S)


def block_lists(rows: Rows, ratio: int, page_size: int) -> BlockLists:
    """For entries of ``ratio`` tokens."""
    starts_R, lengths_R, slots_R = (
        np.asarray(each, dtype=np.int64) for each in (rows.starts, rows.lengths, rows.slots)
    )
    ends_R = starts_R + lengths_R
    num_runs_R = (ends_R - 1) // ratio - starts_R // ratio + 1
    row_S = np.repeat(np.arange(len(num_runs_R)), num_runs_R)
    first_run_R = np.cumsum(num_runs_R) - num_runs_R
    block_S = np.arange(len(row_S)) - first_run_R[row_S] + (starts_R // ratio)[row_S]
    begin_S = np.maximum(block_S * ratio, starts_R[row_S])
    end_S = np.minimum((block_S + 1) * ratio, ends_R[row_S])
    closed_C = np.flatnonzero(end_S % ratio == 0)
    row_C, block_C = row_S[closed_C], block_S[closed_C]
    is_first_C = closed_C == first_run_R[row_C]
    last_run_R = first_run_R + num_runs_R - 1
    is_open_R = ends_R % ratio > 0
    last_closed_R = last_run_R - is_open_R
    has_closed_R = last_closed_R >= first_run_R
    device = rows.positions_T.device
    to_device = _ToDevice(device)
    per_page = page_size // ratio
    pages_C = rows.page_table_RW[to_device(row_C), to_device(block_C // per_page)].long()
    saved = [
        (first_run_R[save.row] + (save.position - 1) // ratio - starts_R[save.row] // ratio) for save in rows.saves
    ]
    return BlockLists(
        lengths_S=to_device(end_S - begin_S),
        ape_T=rows.positions_T % ratio,
        slots_S=to_device(slots_R[row_S]),
        continues_S=to_device(begin_S % ratio > 0),
        closed_C=to_device(closed_C),
        prior_C=to_device(np.where(is_first_C, len(row_S) + slots_R[row_C], closed_C - 1)),
        has_prior_C=to_device(block_C > 0),
        place_C=pages_C * per_page + to_device(block_C % per_page),
        first_C=to_device(block_C * ratio),
        open=Copies(to_device(last_run_R[is_open_R]), to_device(slots_R[is_open_R])),
        last=Copies(to_device(last_closed_R[has_closed_R]), to_device(slots_R[has_closed_R])),
        saved=Copies(
            to_device(np.array(saved, dtype=np.int64)),
            to_device(np.array([s.snapshot for s in rows.saves], dtype=np.int64)),
        ),
    )


class _ToDevice(NamedTuple):
    device: torch.device

    def __call__(self, values: npt.NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(values).to(self.device)


@dataclass(frozen=True, slots=True)
class EntryLists:
    """The complete entries of one ratio that each token may see: the first ``count_T`` of its row's."""

    entries_RM: Tensor
    """int64: rows of the layer's pages, in the order of the request; unused ones are the dummy page's."""
    row_T: Tensor
    """int64."""
    count_T: Tensor
    """int64: ``(position + 1) // ratio``; the block that a token closes counts."""

    @property
    def width(self) -> int:
        """M."""
        return self.entries_RM.shape[1]

    def of(self, tokens: slice, width: int | None = None) -> Tensor:
        """int64 ``[tokens, M]``; ``[tokens, width]`` for tokens that see no more."""
        index = self.entries_RM[self.row_T[tokens], :width]
        is_seen = torch.arange(index.shape[1], device=index.device) < self.count_T[tokens, None]
        return index.masked_fill(~is_seen, -1)


def entry_lists(rows: Rows, ratio: int, page_size: int) -> EntryLists:
    """For entries of ``ratio`` tokens."""
    device, per_page = rows.positions_T.device, page_size // ratio
    ends = [start + length for start, length in zip(rows.starts, rows.lengths, strict=True)]
    entry_M = torch.arange(max(ends) // ratio, device=device)
    pages_RM = rows.page_table_RW[:, entry_M // per_page].long()
    lengths_R = torch.tensor(rows.lengths, device=device)
    return EntryLists(
        entries_RM=pages_RM * per_page + entry_M % per_page,
        row_T=torch.repeat_interleave(torch.arange(rows.num_rows, device=device), lengths_R),
        count_T=(rows.positions_T + 1) // ratio,
    )


@dataclass(frozen=True, slots=True)
class ChosenEntries:
    """Entries that an indexer chose for each token."""

    index_TK: Tensor
    """int64."""

    @property
    def width(self) -> int:
        """K."""
        return self.index_TK.shape[1]

    def of(self, tokens: slice, width: int | None = None) -> Tensor:
        """int64 ``[tokens, K]``."""
        return self.index_TK[tokens, :width]
