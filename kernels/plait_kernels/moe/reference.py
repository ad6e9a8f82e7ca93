"""Mixture of experts in torch.

Shapes: T tokens, E experts, K experts a token, H the hidden size, I an expert's width, N = T K pairs
of token and expert.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from plait_kernels.activation import silu_mul


def softmax_top_k(logits_TE: Tensor, top_k: int, normalise: bool) -> tuple[Tensor, Tensor]:
    """The ``top_k`` most probable experts: their probabilities, float32 ``[T, K]``, and ids, int64 ``[T, K]``.

    The softmax is over all experts; ``normalise`` makes the chosen ones' probabilities sum to 1.
    """
    weights_TK, experts_TK = logits_TE.float().softmax(dim=-1).topk(top_k, dim=-1)
    if normalise:
        weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True)
    return weights_TK, experts_TK


def expert_mlps(x_TH: Tensor, gate_up_EJH: Tensor, down_EHI: Tensor, weights_TK: Tensor, experts_TK: Tensor) -> Tensor:
    """The weighted sum of each token's experts, ``[T, H]`` in the dtype of ``x``; J = 2 I, gate rows first.

    Experts run one after the other, each over its own tokens; one without tokens costs nothing. The
    sum is float32 in the order of a token's own experts, so that it does not depend on the batch.
    """
    num_tokens, top_k = experts_TK.shape
    out_NH = expert_parts(x_TH, gate_up_EJH, down_EHI, experts_TK)
    out_TKH = out_NH.view(num_tokens, top_k, -1).float()
    return torch.einsum("tkh,tk->th", out_TKH, weights_TK).to(x_TH.dtype)


def expert_parts(x_TH: Tensor, gate_up_EJH: Tensor, down_EHI: Tensor, experts_TK: Tensor) -> Tensor:
    """Each pair's output, ``[T K, H]``; that of a pair whose expert is -1 has any value."""
    num_tokens, top_k = experts_TK.shape
    experts_N = experts_TK.flatten() + 1  # 0 is nobody's
    order_N = experts_N.argsort(stable=True)
    _, *counts = experts_N.bincount(minlength=gate_up_EJH.shape[0] + 1).tolist()
    out_NH = x_TH.new_empty(num_tokens * top_k, x_TH.shape[1])
    for expert, pairs in enumerate(torch.split(order_N[len(order_N) - sum(counts) :], counts)):
        if len(pairs):
            gate_up = F.linear(x_TH[pairs // top_k], gate_up_EJH[expert])
            out_NH[pairs] = F.linear(silu_mul(gate_up), down_EHI[expert])
    return out_NH
