"""DeepSeek-V4's attention with plain torch operations, in float32: the reference of every other backend.

Shapes: T tokens, B those of one call, W the window, M entries of a list, H heads, D elements of a head, I indexer
heads, E elements of theirs; entries ``[N + 1, P / ratio, D]``, index keys ``[N + 1, P / ratio, E]``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from plait_worker.attention.backend import BackendRequirements
from plait_worker.attention.compressed.row_lists import (
    BlockLists,
    ChosenEntries,
    EntryLists,
    RawLayout,
    WindowLists,
    block_lists,
    entry_lists,
    window_lists,
)
from plait_worker.attention.spec import CompressedShape
from plait_worker.rows import Rows

MAX_GATHERED = 1 << 20
"""Elements gathered by one call, unless one token's are more: they stay in the cache until they are read."""


class TorchCompressed:
    """``AttentionBackend`` on any device."""

    name = "torch"
    is_capturable = False
    captured_prefill = None

    def __init__(self, requirements: BackendRequirements[CompressedShape]) -> None:
        """For layers of one ratio."""
        self.requirements = requirements

    def prepare(self, rows: Rows) -> CompressedStep:
        """The step's lists are made when the first layer asks for them."""
        return CompressedStep(self.requirements, rows)


@dataclass(frozen=True)
class CompressedStep:
    """The attention of one step in all layers of one ratio."""

    requirements: BackendRequirements[CompressedShape]
    rows: Rows

    @property
    def shape(self) -> CompressedShape:
        """Of the layers."""
        return self.requirements.spec

    def window(self, layout: RawLayout) -> WindowLists:
        """The same for every ratio."""
        return window_lists(self.rows, self.shape.window, layout)

    @cached_property
    def blocks(self) -> BlockLists:
        """Of layers with entries."""
        return block_lists(self.rows, self.shape.ratio, self.requirements.page_size)

    @cached_property
    def entries(self) -> EntryLists:
        """Of layers with entries."""
        return entry_lists(self.rows, self.shape.ratio, self.requirements.page_size)

    def choose(self, q_TIE: Tensor, weights_TI: Tensor, index_keys: Tensor) -> EntryLists | ChosenEntries:
        """The entries that each token sees: the best ``top_k`` by the indexer; all while there are no more."""
        entries = self.entries
        if not self.shape.overlaps or entries.width <= self.shape.top_k:
            return entries
        keys_FE = index_keys.flatten(0, 1)
        chosen = [self._best(q_TIE[part], weights_TI[part], keys_FE, part, rows) for part, rows in self._parts()]
        return ChosenEntries(torch.cat(chosen))

    def _best(self, q_BIE: Tensor, weights_BI: Tensor, keys_FE: Tensor, part: slice, rows: slice) -> Tensor:
        """int64 ``[B, top_k]``."""
        entries_GM = self.entries.entries_RM[rows, : max(self._num_entries[rows])]
        width = max(entries_GM.shape[1], self.shape.top_k)
        keys_GME = keys_FE.index_select(0, entries_GM.flatten()).view(*entries_GM.shape, keys_FE.shape[1])
        scores_BM = _scores(q_BIE.float(), weights_BI, keys_GME.float())
        count_B1 = self.entries.count_T[part, None]
        is_seen_BM = torch.arange(entries_GM.shape[1], device=keys_FE.device) < count_B1
        scores_BM = scores_BM.masked_fill_(~is_seen_BM, -torch.inf)
        if entries_GM.shape[1] < width:
            scores_BM = torch.nn.functional.pad(scores_BM, (0, width - entries_GM.shape[1]), value=-torch.inf)
            entries_GM = torch.nn.functional.pad(entries_GM, (0, width - entries_GM.shape[1]))
        best_BK = scores_BM.topk(self.shape.top_k, dim=1, sorted=False).indices
        index_BK = entries_GM.expand(len(best_BK), -1).gather(1, best_BK)
        return index_BK.masked_fill_(best_BK >= count_B1, -1)

    @cached_property
    def _num_entries(self) -> list[int]:
        ends = zip(self.rows.starts, self.rows.lengths, strict=True)
        return [(start + length) // self.shape.ratio for start, length in ends]

    def _parts(self) -> Iterator[tuple[slice, slice]]:
        """Tokens whose scores are computed together, and their rows: some of one row, or rows of one token each."""
        first, row = 0, 0
        while row < self.rows.num_rows:
            length, width = self.rows.lengths[row], max(1, self._num_entries[row])
            if length == 1:
                last = row + 1
                while last < self.rows.num_rows and self.rows.lengths[last] == 1:
                    last += 1
                for part in alike([max(1, num) * self.shape.index_dim for num in self._num_entries[row:last]]):
                    tokens = slice(first + part.start, first + part.stop)
                    yield tokens, slice(row + part.start, row + part.stop)
                first, row = first + last - row, last
                continue
            size = max(1, MAX_GATHERED // (width * self.shape.num_index_heads))
            for begin in range(0, length, size):
                yield slice(first + begin, first + min(begin + size, length)), slice(row, row + 1)
            first, row = first + length, row + 1

    def attend(
        self,
        q_THD: Tensor,
        raw: Tensor,
        entries: Tensor,
        window: WindowLists,
        seen: EntryLists | ChosenEntries | None,
        sinks_H: Tensor,
    ) -> Tensor:
        """``[T, H, D]``: one softmax over a token's raw keys, entries and its heads' sinks; keys are values."""
        out_THD = torch.empty_like(q_THD)
        entries_FD = entries.flatten(0, 1)
        for part, width in self._seen_parts if isinstance(seen, EntryLists) else self._equal_parts(seen):
            sets = [(raw, window.index_TW[part])]
            if seen is not None and width:
                sets.append((entries_FD, seen.of(part, width)))
            out_THD[part] = _attend(q_THD[part].float(), sets, sinks_H, self.shape.head_dim**-0.5)
        return out_THD

    @cached_property
    def _seen_parts(self) -> list[tuple[slice, int]]:
        """Tokens that attend together, and the most entries that one of them sees."""
        counts = self.entries.count_T.tolist()
        parts = alike([(self.shape.window + count) * self.shape.head_dim for count in counts])
        return [(part, max(counts[part])) for part in parts]

    def _equal_parts(self, seen: ChosenEntries | None) -> list[tuple[slice, int]]:
        """The same where all see as many."""
        width = 0 if seen is None else seen.width
        size = max(1, MAX_GATHERED // ((self.shape.window + width) * self.shape.head_dim))
        num_tokens = sum(self.rows.lengths)
        return [(slice(first, min(first + size, num_tokens)), width) for first in range(0, num_tokens, size)]


def alike(sizes: Sequence[int]) -> Iterator[slice]:
    """Runs of neighbours that are padded to the longest: up to ``MAX_GATHERED`` elements, half of them padding at most.

    One that is larger by itself is a run of its own.
    """
    first, widest, total = 0, 0, 0
    for place, size in enumerate(sizes):
        num, width = place + 1 - first, max(widest, size)
        if num > 1 and num * width > min(MAX_GATHERED, 2 * (total + size)):
            yield slice(first, place)
            first, width, total = place, size, 0
        widest, total = width, total + size
    if sizes:
        yield slice(first, len(sizes))


def _scores(q_BIE: Tensor, weights_BI: Tensor, keys_GME: Tensor) -> Tensor:
    """``[B, M]``: the heads' weighted sum, rectified first; G is 1 if all tokens are of one row, else B."""
    scale = (q_BIE.shape[1] * q_BIE.shape[2]) ** -0.5
    if len(keys_GME) == 1:
        products_BIM = (q_BIE.flatten(0, 1) @ keys_GME[0].T).view(*q_BIE.shape[:2], -1)
    else:
        products_BIM = torch.bmm(q_BIE, keys_GME.transpose(1, 2))
    return torch.bmm((weights_BI.float() * scale)[:, None], products_BIM.relu_())[:, 0]


def _listed(rows_ND: Tensor, index_BM: Tensor) -> Tensor:
    """float32 ``[B, M, D]``, zero for -1: a weight of zero would not hide a NaN of a row that is not in the list."""
    listed_BMD = rows_ND.index_select(0, index_BM.clamp(min=0).flatten()).float().view(*index_BM.shape, -1)
    return listed_BMD.masked_fill((index_BM < 0)[..., None], 0)


def _attend(q_BHD: Tensor, sets: list[tuple[Tensor, Tensor]], sinks_H: Tensor, scale: float) -> Tensor:
    """``[B, H, D]`` over several sets of rows, each with a list; -1 is nothing."""
    keys = [_listed(rows, index) for rows, index in sets]
    scores = [torch.bmm(q_BHD, key_BMD.transpose(1, 2)) for key_BMD in keys]
    index_BM = torch.cat([index for _, index in sets], dim=1)
    scores_BHM = torch.cat(scores, dim=2).mul_(scale).masked_fill_((index_BM < 0)[:, None], -torch.inf)
    sinks_BH1 = sinks_H[None, :, None].expand(len(q_BHD), -1, 1)
    weights_BHM = torch.cat((scores_BHM, sinks_BH1), dim=2).softmax(dim=2)[..., :-1]
    parts = weights_BHM.split([key_BMD.shape[1] for key_BMD in keys], dim=2)
    return sum(
        (torch.bmm(part, key) for part, key in zip(parts[1:], keys[1:], strict=True)), torch.bmm(parts[0], keys[0])
    )
