"""Mixture of experts: routing, and the gated MLPs of the chosen experts."""

from __future__ import annotations

import torch
from torch import Tensor

from plait_kernels.moe import grouped, reference
from plait_kernels.moe.groups import GroupLimit, sigmoid_group_top_k, softmax_group_top_k
from plait_kernels.moe.reference import softmax_top_k


def expert_mlps(x_TH: Tensor, gate_up_EJH: Tensor, down_EHI: Tensor, weights_TK: Tensor, experts_TK: Tensor) -> Tensor:
    """The weighted sum of each token's experts, ``[T, H]`` in the dtype of ``x``; J = 2 I, gate rows first.

    bfloat16 on a GPU goes through grouped GEMMs, all else expert by expert.
    """
    solution = grouped if x_TH.is_cuda and x_TH.dtype == torch.bfloat16 else reference
    out_TH: Tensor = solution.expert_mlps(x_TH, gate_up_EJH, down_EHI, weights_TK, experts_TK)
    return out_TH


__all__ = ["GroupLimit", "expert_mlps", "sigmoid_group_top_k", "softmax_group_top_k", "softmax_top_k"]
