"""Attention over the paged cache: the interface of the backends, and the choice among them.

Shapes: T tokens of the step, H query heads and G key-value heads of this rank, D numbers in a head;
pages ``[N + 1, 2, G, P, D]`` as in ``plait_worker.cache``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from plait_worker.rows import Rows


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What a backend must know of a model before the first step; counts are this rank's."""

    num_heads: int
    """H."""
    num_kv_heads: int
    """G, a divisor of H."""
    head_dim: int
    """D."""
    scale: float
    """Factor of the scores before the softmax."""
    dtype: torch.dtype
    """Of queries, keys and values."""


class StepAttention(Protocol):
    """The attention of one step: made once by ``prepare``, called once a layer."""

    def forward(self, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, pages: Tensor) -> Tensor:
        """Write the step's keys and values into the layer's pages, then attend: ``out_THD``."""
        ...


class AttentionBackend(Protocol):
    """One way to attend; chosen at start-up."""

    def prepare(self, rows: Rows) -> StepAttention:
        """The host's work for one step."""
        ...
