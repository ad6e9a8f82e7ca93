"""Which experts a token goes to. Shapes: T tokens, D the hidden size, E experts, K experts a token."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from plait_kernels.moe import sigmoid_group_top_k, softmax_group_top_k, softmax_top_k
from torch import Tensor

from plait_worker.model_config import GroupRouting, MoeConfig
from plait_worker.weights.reader import Weights

Router = Callable[[Tensor], tuple[Tensor, Tensor]]
"""``x_TD`` -> the experts' weights, float32 ``[T, K]``, and their ids, int64 ``[T, K]``; whole on every rank."""


def read_router(moe: MoeConfig, hidden_size: int, weights: Weights) -> Router:
    """The configuration's kind of router, from ``gate``."""
    if moe.groups is None:
        return _Softmax(moe, hidden_size, weights)
    if moe.groups.scoring == "softmax":
        return _GroupedSoftmax(moe, moe.groups, hidden_size, weights)
    return _GroupedSigmoid(moe, moe.groups, hidden_size, weights)


class _Softmax:
    def __init__(self, moe: MoeConfig, hidden_size: int, weights: Weights) -> None:
        self.moe = moe
        self.gate_ED = weights.take("gate.weight", (moe.num_experts, hidden_size))

    def __call__(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        logits_TE = F.linear(x_TD, self.gate_ED)
        return softmax_top_k(logits_TE, self.moe.num_experts_per_token, self.moe.normalise_top_k)


class _Grouped:
    """DeepSeek's routers, computed in float32 whatever the model's type: their experts lie close together."""

    def __init__(self, moe: MoeConfig, groups: GroupRouting, hidden_size: int, weights: Weights) -> None:
        self.moe, self.groups = moe, groups
        self.gate_ED = weights.take("gate.weight", (moe.num_experts, hidden_size), dtype=torch.float32)

    def logits(self, x_TD: Tensor) -> Tensor:
        return F.linear(x_TD.float(), self.gate_ED)


class _GroupedSoftmax(_Grouped):
    def __call__(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        return softmax_group_top_k(
            self.logits(x_TD), self.moe.num_experts_per_token, self.groups.limit, self.groups.scale
        )


class _GroupedSigmoid(_Grouped):
    def __init__(self, moe: MoeConfig, groups: GroupRouting, hidden_size: int, weights: Weights) -> None:
        super().__init__(moe, groups, hidden_size, weights)
        self.bias_E = weights.take("gate.e_score_correction_bias", (moe.num_experts,), dtype=torch.float32)

    def __call__(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        moe, groups = self.moe, self.groups
        return sigmoid_group_top_k(
            self.logits(x_TD), self.bias_E, moe.num_experts_per_token, groups.limit, groups.scale, moe.normalise_top_k
        )
