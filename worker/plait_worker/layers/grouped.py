"""Grouped-query attention as a kernel for whole blocks sees it."""

from __future__ import annotations

from plait_worker.layers.linear import ColumnLinear, RowLinear
from plait_worker.layers.norm import RmsNorm


class GroupedAttention:
    """Projections, the norms of single heads, and rope over whole heads: all that such an attention consists of."""

    num_heads: int
    """Query heads of this rank."""
    head_dim: int
    qkv: ColumnLinear
    """Query, key and value heads side by side."""
    output: RowLinear
    q_norm: RmsNorm | None = None
    k_norm: RmsNorm | None = None
