"""Which experts a token goes to. Shapes: T tokens, D the hidden size, E experts, K experts a token."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from plait_kernels.moe import Routing, route, softmax_top_k
from torch import Tensor

from plait_worker.layers.matrix import exact_matrix
from plait_worker.model_config import GroupRouting, MoeConfig
from plait_worker.weights.reader import Weights

Router = Callable[[Tensor], tuple[Tensor, Tensor]]
"""``x_TD`` -> the experts' weights, float32 ``[T, K]``, and their ids, int64 ``[T, K]``; whole on every rank."""


def read_router(moe: MoeConfig, hidden_size: int, weights: Weights, bias_name: str, num_shared: int = 0) -> Router:
    """The configuration's kind of router, from ``gate`` and, where it has a bias, the tensor of that name.

    DeepSeek's add ``num_shared`` experts to every token's.
    """
    if moe.groups is None:
        return _Softmax(moe, hidden_size, weights)
    return _Grouped(moe, moe.groups, hidden_size, weights, bias_name, num_shared)


class _Softmax:
    def __init__(self, moe: MoeConfig, hidden_size: int, weights: Weights) -> None:
        self.moe = moe
        self.gate_ED = weights.take("gate.weight", (moe.num_experts, hidden_size))

    def __call__(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        logits_TE = F.linear(x_TD, self.gate_ED)
        return softmax_top_k(logits_TE, self.moe.num_experts_per_token, self.moe.normalise_top_k)


class _Grouped:
    """DeepSeek's and MiniMax's routers, in float32 whatever the model's type: their experts lie close together."""

    def __init__(
        self,
        moe: MoeConfig,
        groups: GroupRouting,
        hidden_size: int,
        weights: Weights,
        bias_name: str,
        num_shared: int,
    ) -> None:
        self.multiply = exact_matrix(weights.take("gate.weight", (moe.num_experts, hidden_size), dtype=torch.float32))
        is_biased = groups.scoring == "sigmoid"
        self.bias_E = weights.take(bias_name, (moe.num_experts,), dtype=torch.float32) if is_biased else None
        top_k, normalise = moe.num_experts_per_token, moe.normalise_top_k
        self.routing = Routing(groups.scoring, top_k, groups.limit, groups.scale, normalise, num_shared)

    def __call__(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        return route(self.multiply(x_TD), self.bias_E, self.routing)
