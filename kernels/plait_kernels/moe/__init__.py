"""Mixture of experts: routing, and the gated MLPs of the chosen experts."""

from plait_kernels.moe.reference import expert_mlps, softmax_top_k

__all__ = ["expert_mlps", "softmax_top_k"]
