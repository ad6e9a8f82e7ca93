"""The gated MLP, dense and as one of many experts.

Shapes: T tokens, D the hidden size, I a rank's share of the MLP's width, E experts, K experts a token.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from plait_kernels.activation import silu_mul
from plait_kernels.moe import expert_mlps, softmax_top_k
from torch import Tensor

from plait_worker.layers.linear import ColumnLinear, Part, RowLinear
from plait_worker.model_config import ModelConfig, MoeConfig
from plait_worker.parallel import Parallel
from plait_worker.weights.reader import Weights


class GatedMlp:
    """``down(silu(gate(x)) * up(x))``."""

    def __init__(self, config: ModelConfig, weights: Weights, parallel: Parallel) -> None:
        """Read ``gate_proj``, ``up_proj`` and ``down_proj``."""
        width = Part("gate_proj", config.intermediate_size)
        both = (width, Part("up_proj", config.intermediate_size))
        self.gate_up = ColumnLinear(weights, both, config.hidden_size, parallel, config.mlp_bias)
        self.down = RowLinear(weights, "down_proj", width, config.hidden_size, parallel, config.mlp_bias)

    def __call__(self, x_TD: Tensor) -> Tensor:
        """``[T, D]``."""
        return self.down(silu_mul(self.gate_up(x_TD)))


class SparseMlp:
    """A router picks K of E gated MLPs for each token; every rank holds a share of every expert."""

    def __init__(self, config: ModelConfig, moe: MoeConfig, weights: Weights, parallel: Parallel) -> None:
        """Read the router ``gate`` and ``experts.N``."""
        self.moe = moe
        self.parallel = parallel
        self.router_ED = weights.take("gate.weight", (moe.num_experts, config.hidden_size))
        share = parallel.share(moe.intermediate_size)
        wide, tall = (moe.intermediate_size, config.hidden_size), (config.hidden_size, moe.intermediate_size)
        experts = [weights.at(f"experts.{expert}") for expert in range(moe.num_experts)]
        self.gate_up_EJD = torch.stack(
            [
                torch.cat([e.take(f"{name}.weight", wide, rows=share) for name in ("gate_proj", "up_proj")])
                for e in experts
            ]
        )
        self.down_EDI = torch.stack([e.take("down_proj.weight", tall, columns=share) for e in experts])

    def __call__(self, x_TD: Tensor) -> Tensor:
        """``[T, D]``."""
        logits_TE = F.linear(x_TD, self.router_ED)
        weights_TK, experts_TK = softmax_top_k(logits_TE, self.moe.num_experts_per_token, self.moe.normalise_top_k)
        return self.parallel.all_reduce(expert_mlps(x_TD, self.gate_up_EJD, self.down_EDI, weights_TK, experts_TK))
