"""Mixture of experts: routing, and the gated MLPs of the chosen experts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain

import torch
from torch import Tensor

from plait_kernels.backends import triton_backend
from plait_kernels.moe import grouped_gemm_torch, reference
from plait_kernels.moe import routing as routing_reference
from plait_kernels.moe.native import ExpertPanels, can_hold_experts
from plait_kernels.moe.reference import softmax_top_k
from plait_kernels.moe.routing import GroupLimit, Routing, sigmoid_group_top_k, softmax_group_top_k

MAX_INDEXED_TOKENS = 2
"""Up to here each pair of token and expert reads its matrices by itself: listing them would take longer."""
MAX_TRITON_TOKENS = 2048
"""Above here torch's grouped GEMM is the faster one; it takes bfloat16 alone."""
_TRITON_DTYPES = (torch.bfloat16, torch.float16)


Experts = Callable[[Tensor, Tensor, Tensor], Tensor]
"""``x_TH``, the chosen experts' weights ``[T, K]`` and their ids ``[T, K]`` -> their weighted sum ``[T, H]``."""


def hold_experts(experts: Iterable[tuple[Tensor, Tensor]]) -> Experts:
    """Experts held for many calls, of ``[J, H]`` (gate rows first) and ``[H, I]`` each; compiled on a CPU.

    There each is asked for when the one before it was copied, so that one of them is in memory twice and not all.
    """
    rest = iter(experts)
    first = next(rest)
    if can_hold_experts(*first):
        return ExpertPanels(chain((first,), rest))
    gate_up_EJH, down_EHI = (torch.stack(each) for each in zip(first, *rest, strict=True))
    return lambda x_TH, weights_TK, experts_TK: expert_mlps(x_TH, gate_up_EJH, down_EHI, weights_TK, experts_TK)


def expert_mlps(x_TH: Tensor, gate_up_EJH: Tensor, down_EHI: Tensor, weights_TK: Tensor, experts_TK: Tensor) -> Tensor:
    """The weighted sum of each token's experts, ``[T, H]`` in the dtype of ``x``; J = 2 I, gate rows first.

    A token's experts differ from each other. On a GPU 16 bits go through Triton, which waits for nothing and can be
    captured, and many tokens in bfloat16 through grouped GEMMs; all else goes expert by expert.
    """
    if not x_TH.is_cuda or x_TH.dtype not in _TRITON_DTYPES:
        return reference.expert_mlps(x_TH, gate_up_EJH, down_EHI, weights_TK, experts_TK)
    if x_TH.shape[0] > MAX_TRITON_TOKENS and x_TH.dtype == torch.bfloat16:
        return grouped_gemm_torch.expert_mlps(x_TH, gate_up_EJH, down_EHI, weights_TK, experts_TK)
    module = "indexed_gemv_triton" if x_TH.shape[0] <= MAX_INDEXED_TOKENS else "grouped_gemm_triton"
    out_TH: Tensor = triton_backend(__name__, module).expert_mlps(x_TH, gate_up_EJH, down_EHI, weights_TK, experts_TK)
    return out_TH


def route(logits_TE: Tensor, bias_E: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor]:
    """Weights, float32, and ids, int64, of each token's experts: ``[T, K + S]``, the shared ones last.

    ``logits_TE`` float32; ``bias_E`` float32, only with sigmoid scores.
    """
    backend = triton_backend(__name__, "routing_triton") if logits_TE.is_cuda else routing_reference
    weights_TK, experts_TK = backend.route(logits_TE, bias_E, routing)
    return weights_TK, experts_TK


__all__ = [
    "Experts",
    "GroupLimit",
    "Routing",
    "expert_mlps",
    "hold_experts",
    "route",
    "sigmoid_group_top_k",
    "softmax_group_top_k",
    "softmax_top_k",
]
