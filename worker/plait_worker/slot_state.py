"""Slot state: what a layer keeps of a running request beside its pages, and snapshots of it.

DeepSeek-V4 keeps a ring of raw keys and running sums of the entries that are not complete. Nothing is cleared for a
new request: what is valid follows from positions.

Shapes: N slots and a dummy, T tokens of the largest step, G places of a ring, D elements of a head, C channels of the
sums, U snapshots.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from plait_worker.attention.compressed.row_lists import RawLayout, WindowLists
from plait_worker.attention.spec import AttentionSpec, CompressedShape

SUM_PARTS = 3
"""Of a softmax over tokens: the largest logit, the sum of exponentials, and the weighted sum of values."""


@dataclass(frozen=True, slots=True)
class LayerState:
    """One layer's."""

    raw: Tensor
    """``[T + (N + 1) G, D]``: the step's own raw keys, then each slot's ring."""
    layout: RawLayout
    sums: Tensor
    """float32 ``[N + 1, 3, C]``: of the block that a slot's last token is in, unless it closed it."""
    last: Tensor
    """float32 ``[N + 1, 3, C / 2]``: of the last complete block, what the next block's entry takes in; else empty."""
    saved_rings: Tensor
    """``[U, G, D]``."""
    saved_last: Tensor
    """``[U, 3, C / 2]``."""

    def rings(self) -> Tensor:
        """``[N + 1, G, D]``."""
        return self.raw[self.layout.num_staged :].view(-1, *self.saved_rings.shape[1:])

    def keep_window(self, window: WindowLists) -> None:
        """Copy raw keys into snapshots, then the step's last ones into the rings."""
        if len(window.saved.target):
            self.saved_rings.flatten(0, 1).index_copy_(0, window.saved.target, self.raw[window.saved.source])
        self.raw.index_copy_(0, window.kept.target, self.raw[window.kept.source])

    def restore(self, slots: Tensor, snapshots: Tensor) -> None:
        """Copy snapshots into slots; at a page boundary no block is begun."""
        self.rings()[slots] = self.saved_rings[snapshots]
        self.last[slots] = self.saved_last[snapshots]


@dataclass(frozen=True, slots=True)
class StateSizes:
    """What a rank allocates."""

    num_slots: int = 0
    max_tokens: int = 0
    """Of one step."""
    num_snapshots: int = 0
    num_drafts: int = 0
    """Of one decode row: a ring keeps so many keys more than the window."""


NO_STATE = StateSizes()
"""Of models without slot state."""


def allocate_state(spec: AttentionSpec, sizes: StateSizes, device: torch.device) -> LayerState | None:
    """A layer's state, zero-filled; None for a layer without one."""
    if not isinstance(spec, CompressedShape):
        return None
    num_slots, channels = sizes.num_slots + 1, spec.num_channels if spec.ratio else 0
    half = channels // 2 if spec.overlaps else 0
    keys, ring = torch.empty(0, dtype=spec.dtype, device=device), spec.window + sizes.num_drafts
    return LayerState(
        raw=keys.new_zeros(sizes.max_tokens + num_slots * ring, spec.head_dim),
        layout=RawLayout(sizes.max_tokens, ring),
        sums=torch.zeros(num_slots, SUM_PARTS, channels, device=device),
        last=torch.zeros(num_slots, SUM_PARTS, half, device=device),
        saved_rings=keys.new_zeros(sizes.num_snapshots, ring, spec.head_dim),
        saved_last=torch.zeros(sizes.num_snapshots, SUM_PARTS, half, device=device),
    )


def slot_bytes(specs: Iterable[AttentionSpec], num_drafts: int = 0) -> int:
    """Of one slot's state over all layers."""
    return sum(_bytes(spec, num_drafts, with_sums=True) for spec in specs)


def snapshot_bytes(specs: Iterable[AttentionSpec], num_drafts: int = 0) -> int:
    """Of one snapshot over all layers."""
    return sum(_bytes(spec, num_drafts, with_sums=False) for spec in specs)


def staged_bytes(specs: Iterable[AttentionSpec], max_tokens: int) -> int:
    """Of the raw keys of one step, over all layers."""
    compressed = (spec for spec in specs if isinstance(spec, CompressedShape))
    return sum(max_tokens * spec.head_dim * spec.dtype.itemsize for spec in compressed)


def _bytes(spec: AttentionSpec, num_drafts: int, with_sums: bool) -> int:
    if not isinstance(spec, CompressedShape):
        return 0
    half = spec.num_channels // 2 if spec.overlaps else 0
    num_sums = half + (spec.num_channels if with_sums and spec.ratio else 0)
    ring_bytes = (spec.window + num_drafts) * spec.head_dim * spec.dtype.itemsize
    return ring_bytes + SUM_PARTS * num_sums * torch.float32.itemsize
