"""Grouped-query attention, as kernels for whole decoder layers read it."""

from __future__ import annotations

from plait_worker.layers.linear import ColumnLinear, RowLinear
from plait_worker.layers.norm import RmsNorm


class GqaAttention:
    """Attention that is only projections, optional norms of each head, and rope over whole heads."""

    num_heads: int
    """Query heads of this rank."""
    head_dim: int
    qkv: ColumnLinear
    """Query, key and value heads side by side."""
    output: RowLinear
    q_norm: RmsNorm | None = None
    k_norm: RmsNorm | None = None
