"""The self-check of MHA and GQA."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from plait_worker.attention.backend import AttentionBackend, BackendRequirements
from plait_worker.attention.mha.torch_mha import TorchMha
from plait_worker.attention.self_check import NUM_PAGES, SelfCheck
from plait_worker.attention.spec import MhaShape
from plait_worker.rows import Rows


class MhaSelfCheck(SelfCheck):
    """Random queries, keys and values over random pages."""

    def __init__(self, requirements: BackendRequirements[MhaShape]) -> None:
        super().__init__(requirements, TorchMha(requirements))
        self.shape = shape = requirements.spec
        self.pages = self.random(NUM_PAGES + 1, 2, shape.num_kv_heads, requirements.page_size, shape.head_dim).to(
            shape.cached_dtype
        )

    def _attend(self, backend: AttentionBackend[Any], rows: Rows) -> Callable[[], Tensor]:
        generator = torch.Generator(self.device).manual_seed(0)
        q_THD, k_TGD, v_TGD = (
            self.random(rows.num_tokens, num_heads, self.shape.head_dim, generator=generator)
            for num_heads in (self.shape.num_heads, self.shape.num_kv_heads, self.shape.num_kv_heads)
        )
        step = backend.prepare(rows)
        return lambda: step.forward(q_THD, k_TGD, v_TGD, self.pages, self.shape.scales)
