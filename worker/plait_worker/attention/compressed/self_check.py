"""The self-check of DeepSeek-V4's attention: random rings and entries, the same queries for both backends.

Shapes as in ``plait_worker.attention.compressed.torch_compressed``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from plait_worker.attention.backend import AttentionBackend, BackendRequirements
from plait_worker.attention.compressed.row_lists import RawLayout
from plait_worker.attention.compressed.torch_compressed import CompressedStep, TorchCompressed
from plait_worker.attention.self_check import NUM_PAGES, SelfCheck
from plait_worker.attention.spec import CompressedShape
from plait_worker.rows import Rows


class CompressedSelfCheck(SelfCheck):
    """One layer's rings, entries and indexer keys."""

    def __init__(self, requirements: BackendRequirements[CompressedShape]) -> None:
        super().__init__(requirements, TorchCompressed(requirements))
        self.shape = shape = requirements.spec
        self.layout = RawLayout(self.num_tokens(requirements.page_size), shape.window)
        num_slots = len(self.decode.slots)
        self.rings = self.random(num_slots * shape.window, shape.head_dim)
        pages = NUM_PAGES + 1
        self.entries = self.random(pages, *shape.page_shape(requirements.page_size))
        self.index_keys = self.random(pages, *shape.index_page_shape(requirements.page_size))
        self.sinks_H = self.random(shape.num_heads).float()

    def _attend(self, backend: AttentionBackend[Any], rows: Rows) -> Callable[[], Tensor]:
        shape, generator = self.shape, torch.Generator(self.device).manual_seed(0)
        q_THD = self.random(rows.num_tokens, shape.num_heads, shape.head_dim, generator=generator)
        staged = self.random(self.layout.num_staged, shape.head_dim, generator=generator)
        index_q = self.random(rows.num_tokens, shape.num_index_heads, shape.index_dim, generator=generator)
        weights = self.random(rows.num_tokens, shape.num_index_heads, generator=generator)
        step: CompressedStep = backend.prepare(rows)
        raw, window = torch.cat((staged, self.rings)), step.window(self.layout)
        seen = step.choose(index_q, weights, self.index_keys) if shape.ratio else None
        return lambda: step.attend(q_THD, raw, self.entries, window, seen, self.sinks_H)
