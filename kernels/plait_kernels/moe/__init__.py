"""Mixture of experts: routing, and the gated MLPs of the chosen experts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain

import torch
from torch import Tensor

from plait_kernels.backends import Backend, Op, above, of_dtype, on_device, up_to
from plait_kernels.moe.cpu import can_pack_experts, dense_experts
from plait_kernels.moe.fp8_experts import Fp8Experts, stack_fp8
from plait_kernels.moe.int4_experts import Int4Experts, stack_int4
from plait_kernels.moe.parts import MAX_INDEXED, MAX_LISTED, ExpertStack, RowParts
from plait_kernels.moe.reference import softmax_top_k
from plait_kernels.moe.routing import GroupLimit, Routing, sigmoid_group_top_k, softmax_group_top_k

_MAX_INDEXED = MAX_INDEXED
"""Up to so many tokens each (token, expert) pair reads its matrices by itself: listing pairs would take longer."""
_MAX_LISTED = MAX_LISTED
"""Above so many tokens torch's grouped GEMM is faster; it takes bfloat16 alone."""
_GPU = on_device("cuda"), of_dtype(torch.bfloat16, torch.float16)
_expert_mlps = Op(
    __name__,
    "expert_mlps",
    Backend("indexed_gemv_triton", (*_GPU, up_to(_MAX_INDEXED, "tokens"))),
    Backend("grouped_gemm_torch", (on_device("cuda"), of_dtype(torch.bfloat16), above(_MAX_LISTED, "tokens"))),
    Backend("grouped_gemm_triton", _GPU),
    Backend("reference"),
)
"""The size of a call is its number of tokens."""
_route = Op(__name__, "route", Backend("routing_triton", (on_device("cuda"),)), Backend("routing"))

Experts = Callable[[Tensor, Tensor, Tensor], Tensor]
"""``x_TH``, the chosen experts' weights ``[T, K]`` and their ids ``[T, K]`` -> their weighted sum ``[T, H]``."""


def pack_experts(experts: Iterable[tuple[Tensor, Tensor]]) -> Experts:
    """Experts held for many calls, of ``[J, H]`` (gate rows first) and ``[H, I]`` each; compiled on a CPU.

    There each is asked for when the one before it was copied, so that one of them is in memory twice and not all.
    """
    rest = iter(experts)
    first = next(rest)
    if can_pack_experts(*first):
        return dense_experts(chain((first,), rest))
    gate_up_EJH, down_EHI = (torch.stack(each) for each in zip(first, *rest, strict=True))
    return ExpertStack(gate_up_EJH, down_EHI)


def expert_mlps(x_TH: Tensor, gate_up_EJH: Tensor, down_EHI: Tensor, weights_TK: Tensor, experts_TK: Tensor) -> Tensor:
    """The weighted sum of each token's experts, ``[T, H]`` in the dtype of ``x``; J = 2 I, gate rows first.

    A token's experts differ from each other. On a GPU 16 bits go through Triton, which waits for nothing and can be
    captured, and many tokens in bfloat16 through grouped GEMMs; all else goes expert by expert.
    """
    # No rule tells larger sizes apart; the choice for each size is kept.
    size = min(x_TH.shape[0], _MAX_LISTED + 1)
    out_TH: Tensor = _expert_mlps(x_TH, size)(x_TH, gate_up_EJH, down_EHI, weights_TK, experts_TK)
    return out_TH


def route(logits_TE: Tensor, bias_E: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor]:
    """Weights, float32, and ids, int64, of each token's experts: ``[T, K + S]``, the shared ones last.

    ``logits_TE`` float32; ``bias_E`` float32, only with sigmoid scores.
    """
    weights_TK, experts_TK = _route(logits_TE)(logits_TE, bias_E, routing)
    return weights_TK, experts_TK


__all__ = [
    "ExpertStack",
    "Experts",
    "Fp8Experts",
    "GroupLimit",
    "Int4Experts",
    "Routing",
    "RowParts",
    "expert_mlps",
    "pack_experts",
    "route",
    "sigmoid_group_top_k",
    "softmax_group_top_k",
    "softmax_top_k",
    "stack_fp8",
    "stack_int4",
]
