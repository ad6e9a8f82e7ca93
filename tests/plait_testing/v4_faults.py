"""The faults that other servers of DeepSeek-V4 had, put into a loaded model; each must fail a comparison."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from plait_worker.attention.compressed.row_lists import (
    BlockLists,
    EntryLists,
    RawLayout,
    WindowLists,
    block_lists,
    entry_lists,
    window_lists,
)
from plait_worker.layers.pair_rope import PairRope, rotate_last
from plait_worker.layers.streams import StreamMixer
from plait_worker.rows import Rows
from torch import Tensor

BACKEND = "plait_worker.attention.compressed.torch_compressed"
MODEL = "plait_worker.models.deepseek_v4"
Fault = Callable[[pytest.MonkeyPatch, Any], None]


def _drop_ape(_patch: pytest.MonkeyPatch, model: Any) -> None:
    for block in model.blocks:
        if block.attention.compressor is not None:
            block.attention.compressor.ape.zero_()


def _drop_router_bias(_patch: pytest.MonkeyPatch, model: Any) -> None:
    for block in model.blocks:
        if hasattr(block.moe.router, "bias_E"):
            block.moe.router.bias_E.zero_()


def _drop_clamp(_patch: pytest.MonkeyPatch, model: Any) -> None:
    for block in model.blocks:
        for mlp in (*block.moe.experts.experts, block.moe.shared):
            mlp.limit = torch.inf


def _transpose_comb(patch: pytest.MonkeyPatch, _model: Any) -> None:
    right = StreamMixer._sinkhorn
    patch.setattr(StreamMixer, "_sinkhorn", lambda self, comb: right(self, comb).transpose(1, 2))


def _one_sinkhorn_round(_patch: pytest.MonkeyPatch, model: Any) -> None:
    for block in model.blocks:
        for mixer in (block.attention_mixer, block.moe_mixer):
            mixer.streams = replace(mixer.streams, num_iterations=1)


def _change_window(patch: pytest.MonkeyPatch, change: Callable[[Rows, WindowLists, int, RawLayout], Tensor]) -> None:
    def wrong(rows: Rows, window: int, layout: RawLayout) -> WindowLists:
        lists = window_lists(rows, window, layout)
        return replace(lists, index_TW=change(rows, lists, window, layout))

    patch.setattr(f"{BACKEND}.window_lists", wrong)


def _longer_window(patch: pytest.MonkeyPatch, _model: Any) -> None:
    def change(rows: Rows, lists: WindowLists, window: int, layout: RawLayout) -> Tensor:
        lengths = torch.tensor(rows.lengths)
        start_T, slot_T = (torch.tensor(each).repeat_interleave(lengths) for each in (rows.starts, rows.slots))
        at_T = rows.positions_T - window
        ring_T = layout.num_staged + slot_T * layout.ring + at_T % layout.ring
        more_T = torch.where(at_T >= start_T, torch.arange(len(at_T)) - window, ring_T).masked_fill(at_T < 0, -1)
        return torch.cat((more_T[:, None], lists.index_TW), dim=1)

    _change_window(patch, change)


def _shorter_ring(patch: pytest.MonkeyPatch, _model: Any) -> None:
    def change(_rows: Rows, lists: WindowLists, _window: int, layout: RawLayout) -> Tensor:
        oldest_T = lists.index_TW[:, 0]
        return torch.cat(
            (oldest_T.masked_fill(oldest_T >= layout.num_staged, -1)[:, None], lists.index_TW[:, 1:]), dim=1
        )

    _change_window(patch, change)


def _change_counts(patch: pytest.MonkeyPatch, count: Callable[[Rows, int], Tensor]) -> None:
    def wrong(rows: Rows, ratio: int, page_size: int) -> EntryLists:
        return replace(entry_lists(rows, ratio, page_size), count_T=count(rows, ratio))

    patch.setattr(f"{BACKEND}.entry_lists", wrong)


def _chunk_end(patch: pytest.MonkeyPatch, _model: Any) -> None:
    def count(rows: Rows, ratio: int) -> Tensor:
        ends = torch.tensor([s + n for s, n in zip(rows.starts, rows.lengths, strict=True)])
        return ends.repeat_interleave(torch.tensor(rows.lengths)) // ratio

    _change_counts(patch, count)


def _block_not_counted(patch: pytest.MonkeyPatch, _model: Any) -> None:
    _change_counts(patch, lambda rows, ratio: rows.positions_T // ratio)


def _change_blocks(patch: pytest.MonkeyPatch, change: Callable[[BlockLists, int], BlockLists]) -> None:
    def wrong(rows: Rows, ratio: int, page_size: int) -> BlockLists:
        return change(block_lists(rows, ratio, page_size), ratio)

    patch.setattr(f"{BACKEND}.block_lists", wrong)


def _drop_overlap(patch: pytest.MonkeyPatch, _model: Any) -> None:
    _change_blocks(patch, lambda lists, _ratio: replace(lists, has_prior_C=torch.zeros_like(lists.has_prior_C)))


def _rope_at_block_end(patch: pytest.MonkeyPatch, _model: Any) -> None:
    _change_blocks(patch, lambda lists, ratio: replace(lists, first_C=lists.first_C + ratio - 1))


def _drop_relu(patch: pytest.MonkeyPatch, _model: Any) -> None:
    def scores(q_BIE: Tensor, weights_BI: Tensor, keys_GME: Tensor) -> Tensor:
        return torch.einsum("bie,bme,bi->bm", q_BIE, keys_GME.expand(len(q_BIE), -1, -1), weights_BI)

    patch.setattr(f"{BACKEND}._scores", scores)


def _last_entries(patch: pytest.MonkeyPatch, _model: Any) -> None:
    def scores(q_BIE: Tensor, _weights_BI: Tensor, keys_GME: Tensor) -> Tensor:
        return torch.arange(keys_GME.shape[1]).float().expand(len(q_BIE), -1).clone()

    patch.setattr(f"{BACKEND}._scores", scores)


def _drop_sinks(_patch: pytest.MonkeyPatch, model: Any) -> None:
    for block in model.blocks:
        block.attention.sinks_H.fill_(-torch.inf)


def _no_inverse_rope(patch: pytest.MonkeyPatch, _model: Any) -> None:
    patch.setattr(f"{MODEL}.rotate_last", lambda x, rotations: x if rotations.is_conj() else rotate_last(x, rotations))


def _no_yarn(_patch: pytest.MonkeyPatch, model: Any) -> None:
    attention = model.config.compressed
    plain = replace(attention.entry_rope, scaling=None)
    model.entry_rope = PairRope(plain, attention.rope_dim, torch.device("cpu"))


def _yarn_on_dense(_patch: pytest.MonkeyPatch, model: Any) -> None:
    attention = model.config.compressed
    scaled = replace(model.config.rope, scaling=attention.entry_rope.scaling)
    model.rope = PairRope(scaled, attention.rope_dim, torch.device("cpu"))


FAULTS: dict[str, Fault] = {
    "ape dropped": _drop_ape,
    "router bias dropped": _drop_router_bias,
    "clamp dropped": _drop_clamp,
    "comb transposed": _transpose_comb,
    "one Sinkhorn round": _one_sinkhorn_round,
    "window one longer": _longer_window,
    "ring one short": _shorter_ring,
    "chunk's end instead of the token's own limit": _chunk_end,
    "the block that a token closes not counted": _block_not_counted,
    "overlap dropped": _drop_overlap,
    "entry's rope at the block's last token": _rope_at_block_end,
    "relu dropped": _drop_relu,
    "last entries instead of the best": _last_entries,
    "sinks dropped": _drop_sinks,
    "no inverse rope": _no_inverse_rope,
    "no YaRN": _no_yarn,
    "YaRN on dense layers": _yarn_on_dense,
}
