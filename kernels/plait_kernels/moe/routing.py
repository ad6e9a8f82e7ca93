"""Group-limited routing (DeepSeek-V2, arXiv 2405.04434; V3, arXiv 2412.19437).

Shapes: T tokens, E experts in N groups of M, K experts a token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class GroupLimit:
    """The number of groups that a token's experts may come from; one group of one is no limit."""

    num_groups: int
    """N, a divisor of E."""
    num_kept: int
    """Groups that a token may use."""


@dataclass(frozen=True, slots=True)
class Routing:
    """How a router chooses experts and weighs them."""

    scoring: Literal["softmax", "sigmoid"]
    """V2's, or V3's."""
    top_k: int
    """Experts chosen for a token."""
    limit: GroupLimit
    scale: float
    """Factor of the chosen experts' weights."""
    normalise: bool = False
    """Whether sigmoid scores are divided by their sum; a softmax's never are."""
    num_shared: int = 0
    """S: shared experts, after all others, that every token uses with weight 1."""


def route(logits_TE: Tensor, bias_E: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor]:
    """See ``plait_kernels.moe.route``."""
    limit, scale = routing.limit, routing.scale
    if routing.scoring == "softmax":
        weights_TK, experts_TK = softmax_group_top_k(logits_TE, routing.top_k, limit, scale)
    else:
        bias_E = torch.zeros_like(logits_TE[0]) if bias_E is None else bias_E
        weights_TK, experts_TK = sigmoid_group_top_k(logits_TE, bias_E, routing.top_k, limit, scale, routing.normalise)
    shared_S = logits_TE.shape[1] + torch.arange(routing.num_shared, device=logits_TE.device)
    ones_TS = weights_TK.new_ones(len(weights_TK), routing.num_shared)
    return torch.cat((weights_TK, ones_TS), dim=1), torch.cat((experts_TK, shared_S.expand_as(ones_TS)), dim=1)


def softmax_group_top_k(logits_TE: Tensor, top_k: int, limit: GroupLimit, scale: float) -> tuple[Tensor, Tensor]:
    """V2: weights float32 ``[T, K]``, ids int64 ``[T, K]``; a group is worth its most probable expert.

    The probabilities are multiplied by ``scale`` and never normalised.
    """
    probabilities_TE = logits_TE.float().softmax(dim=-1)
    weights_TK, experts_TK = _mask_other_groups(probabilities_TE, limit, num_best=1).topk(top_k, dim=-1)
    return weights_TK * scale, experts_TK


def sigmoid_group_top_k(
    logits_TE: Tensor, bias_E: Tensor, top_k: int, limit: GroupLimit, scale: float, normalise: bool
) -> tuple[Tensor, Tensor]:
    """V3: weights float32 ``[T, K]``, ids int64 ``[T, K]``; a group is worth the sum of its two best experts.

    ``bias_E`` (float32) helps to choose and does not weigh; ``normalise`` makes the chosen experts'
    scores sum to 1 before they are multiplied by ``scale``.
    """
    scores_TE = logits_TE.float().sigmoid()
    experts_TK = _mask_other_groups(scores_TE + bias_E, limit, num_best=2).topk(top_k, dim=-1).indices
    weights_TK = scores_TE.gather(1, experts_TK)
    if normalise:
        weights_TK = weights_TK / (weights_TK.sum(dim=-1, keepdim=True) + 1e-20)
    return weights_TK * scale, experts_TK


def _mask_other_groups(scores_TE: Tensor, limit: GroupLimit, num_best: int) -> Tensor:
    """The scores, with -inf outside the groups whose ``num_best`` best experts sum to most."""
    if limit.num_kept == limit.num_groups:
        return scores_TE
    scores_TNM = scores_TE.view(len(scores_TE), limit.num_groups, -1)
    worth_TN = scores_TNM.topk(num_best, dim=-1).values.sum(dim=-1)
    is_out_TN = torch.ones_like(worth_TN, dtype=torch.bool)
    is_out_TN.scatter_(1, worth_TN.topk(limit.num_kept, dim=-1).indices, False)
    return scores_TNM.masked_fill(is_out_TN[..., None], -torch.inf).view_as(scores_TE)
