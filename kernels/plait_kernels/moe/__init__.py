"""Mixture of experts: routing, and the gated MLPs of the chosen experts."""

from plait_kernels.moe.groups import GroupLimit, sigmoid_group_top_k, softmax_group_top_k
from plait_kernels.moe.reference import expert_mlps, softmax_top_k

__all__ = ["GroupLimit", "expert_mlps", "sigmoid_group_top_k", "softmax_group_top_k", "softmax_top_k"]
