"""Gated MLPs whose gate and up-projection are bounded, and DeepSeek-V4's routers.

Shapes: T tokens, D the hidden size, I a rank's shard of an expert's width, E experts, K experts a token.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from plait_kernels.linear import Matrix
from torch import Tensor

from plait_worker.layers.linear import ColumnLinear, Projection, RowLinear
from plait_worker.layers.router import Chosen
from plait_worker.model_config import ModelConfig, MoeConfig
from plait_worker.parallel import Parallel
from plait_worker.weights.reader import Weights


def limited_silu_mul(gate_up_N2I: Tensor, limit: float) -> Tensor:
    """``silu(min(gate, limit)) * clamp(up, -limit, limit)`` of the two halves."""
    gate_NI, up_NI = gate_up_N2I.chunk(2, dim=-1)
    return F.silu(gate_NI.clamp(max=limit)) * up_NI.clamp(-limit, limit)


class LimitedMlp:
    """``w2(silu(min(w1 x, limit)) * clamp(w3 x))``."""

    def __init__(self, config: ModelConfig, weights: Weights, parallel: Parallel, size: int, limit: float) -> None:
        """Read ``w1`` (gate), ``w3`` (up) and ``w2`` (down) of width ``size``."""
        width = Projection("w1", size)
        self.limit = limit
        self.gate_up: Matrix = ColumnLinear(
            weights, (width, Projection("w3", size)), config.hidden_size, parallel
        ).multiply
        self.down: Matrix = RowLinear(weights, "w2", width, config.hidden_size, parallel).multiply

    def __call__(self, x_TD: Tensor) -> Tensor:
        """``[T, D]``, this rank's partial sum."""
        return self.down(limited_silu_mul(self.gate_up(x_TD), self.limit))


class LimitedExperts:
    """The chosen experts of each token, one expert after the other."""

    def __init__(self, experts: Sequence[LimitedMlp]) -> None:
        """All experts of the layer."""
        self.experts = experts

    def __call__(self, x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor) -> Tensor:
        """Their weighted sum ``[T, D]``, in float32 in the order of a token's own experts; this rank's part."""
        num_tokens, top_k = experts_TK.shape
        order_N = experts_TK.flatten().argsort(stable=True)
        counts = experts_TK.flatten().bincount(minlength=len(self.experts)).tolist()
        sorted_ND = x_TD.index_select(0, order_N // top_k)
        out_ND = torch.empty_like(sorted_ND)
        begin = 0
        for expert, count in enumerate(counts):
            if count:
                part = slice(begin, begin + count)
                out_ND[part] = self.experts[expert](sorted_ND[part])
                begin += count
        unsorted_ND = torch.empty_like(out_ND).index_copy_(0, order_N, out_ND)
        out_TKD = unsorted_ND.view(num_tokens, top_k, -1).float()
        return torch.bmm(weights_TK[:, None], out_TKD)[:, 0].to(x_TD.dtype)


class ScoreRouter:
    """Chooses by score and bias, weighs by score."""

    def __init__(self, config: ModelConfig, moe: MoeConfig, weights: Weights) -> None:
        """Read ``gate.weight`` and, if experts are chosen by score, ``gate.bias``."""
        self.moe = moe
        self.weight_ED = weights.take("gate.weight", (moe.num_experts, config.hidden_size), dtype=torch.float32)

    def scores(self, x_TD: Tensor) -> Tensor:
        """float32 ``[T, E]``."""
        return F.softplus(F.linear(x_TD.float(), self.weight_ED)).sqrt()

    def weigh(self, scores_TE: Tensor, experts_TK: Tensor) -> Chosen:
        """The chosen experts' weights."""
        weights_TK = scores_TE.gather(1, experts_TK)
        return weights_TK / (weights_TK.sum(dim=1, keepdim=True) + 1e-20) * self.moe.scale, experts_TK


class BiasRouter(ScoreRouter):
    """Chooses the best scores, each with its expert's bias."""

    def __init__(self, config: ModelConfig, moe: MoeConfig, weights: Weights) -> None:
        """Read ``gate.weight`` and ``gate.bias``."""
        super().__init__(config, moe, weights)
        self.bias_E = weights.take("gate.bias", (moe.num_experts,), dtype=torch.float32)

    def __call__(self, x_TD: Tensor, _token_ids_T: Tensor) -> Chosen:
        """See ``Chosen``."""
        scores_TE = self.scores(x_TD)
        return self.weigh(scores_TE, (scores_TE + self.bias_E).topk(self.moe.num_experts_per_token, dim=1).indices)


class HashRouter(ScoreRouter):
    """Looks a token's experts up by its id."""

    def __init__(self, config: ModelConfig, moe: MoeConfig, weights: Weights) -> None:
        """Read ``gate.weight`` and ``gate.tid2eid``; raises ``ModelFilesError`` if an expert is out of range."""
        super().__init__(config, moe, weights)
        shape = (config.vocab_size, moe.num_experts_per_token)
        self.experts_VK = weights.take_indices("gate.tid2eid", shape, moe.num_experts, "expert")

    def __call__(self, x_TD: Tensor, token_ids_T: Tensor) -> Chosen:
        """See ``Chosen``."""
        return self.weigh(self.scores(x_TD), self.experts_VK[token_ids_T])
