"""Routers of a mixture of experts. Shapes: T tokens, D the hidden size, E experts, K experts a token."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from plait_kernels.linear import ExactOnGpu, RowNorm, exact_matrix, rmsnorm_router_gemv
from plait_kernels.moe import Routing, route, softmax_top_k
from torch import Tensor

from plait_worker.layers.norm import BlockNorm
from plait_worker.model_config import GroupRouting, MoeConfig
from plait_worker.weights.reader import Weights

Chosen = tuple[Tensor, Tensor]
"""The experts' weights, float32 ``[T, K]``, and ids, int64 ``[T, K]``; the same on every rank."""


class Router(ABC):
    """Chooses the experts of each token."""

    @abstractmethod
    def __call__(self, x_TD: Tensor) -> Chosen:
        """For normalised tokens."""

    def with_norm(self, x_TD: Tensor, residual_TD: Tensor, norm: BlockNorm) -> tuple[Chosen, Tensor, Tensor]:
        """For ``norm(x + residual)``; also returns that norm and the sum."""
        normed_TD, residual_TD = norm.add(x_TD, residual_TD)
        return self(normed_TD), normed_TD, residual_TD


def read_router(moe: MoeConfig, hidden_size: int, weights: Weights, bias_name: str, num_shared: int = 0) -> Router:
    """The configuration's kind of router, from ``gate`` and, if it has a bias, the tensor of that name.

    DeepSeek's add ``num_shared`` experts to every token's.
    """
    if moe.groups is None:
        return _Softmax(moe, hidden_size, weights)
    return _Grouped(moe, moe.groups, hidden_size, weights, bias_name, num_shared)


class _Softmax(Router):
    def __init__(self, moe: MoeConfig, hidden_size: int, weights: Weights) -> None:
        self.moe = moe
        self.gate_ED = weights.take("gate.weight", (moe.num_experts, hidden_size))

    def __call__(self, x_TD: Tensor) -> Chosen:
        logits_TE = F.linear(x_TD, self.gate_ED)
        return softmax_top_k(logits_TE, self.moe.num_experts_per_token, self.moe.normalise_top_k)


class _Grouped(Router):
    """DeepSeek's and MiniMax's routers, always in float32: their experts' scores are close together."""

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

    def __call__(self, x_TD: Tensor) -> Chosen:
        return route(self.multiply(x_TD), self.bias_E, self.routing)

    def with_norm(self, x_TD: Tensor, residual_TD: Tensor, norm: BlockNorm) -> tuple[Chosen, Tensor, Tensor]:
        """See ``Router``; for one bfloat16 row on a GPU the norm is fused into the GEMV."""
        multiply = self.multiply
        if not norm.fuses_row(x_TD) or x_TD.dtype != torch.bfloat16 or not isinstance(multiply, ExactOnGpu):
            return super().with_norm(x_TD, residual_TD, norm)
        row_norm = RowNorm(residual_TD, norm.weight_D, norm.eps)
        logits_TE, normed_TD, residual_TD = rmsnorm_router_gemv(x_TD, row_norm, multiply.rounded_OI)
        return route(logits_TE, self.bias_E, self.routing), normed_TD, residual_TD
