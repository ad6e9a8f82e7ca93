"""Mixture of experts by torch's grouped GEMM: all experts in two calls, no matter how the tokens fall.

The sizes of the groups stay on the device, so that nothing waits for it and a step can be captured.

Shapes: T tokens, E experts, K experts a token, H the hidden size, I an expert's width, N = T K pairs
of token and expert.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from plait_kernels.activation import silu_mul


def expert_mlps(x_TH: Tensor, gate_up_EJH: Tensor, down_EHI: Tensor, weights_TK: Tensor, experts_TK: Tensor) -> Tensor:
    """See ``plait_kernels.moe.expert_mlps``; bfloat16 alone, with H and I multiples of 8."""
    from plait_kernels.moe.grouped_gemm_triton import combine  # Triton is there only with a GPU

    order_N, index_N, ends_E = _sort_pairs(experts_TK, len(gate_up_EJH))
    gate_up_NJ = F.grouped_mm(x_TH[order_N // experts_TK.shape[1]], gate_up_EJH.transpose(1, 2), offs=ends_E)
    sorted_NH = F.grouped_mm(silu_mul(gate_up_NJ), down_EHI.transpose(1, 2), offs=ends_E)
    out_TH = torch.empty_like(x_TH)
    combine(sorted_NH, weights_TK, out_TH, index_N)
    return out_TH


def expert_parts(x_TH: Tensor, gate_up_EJH: Tensor, down_EHI: Tensor, experts_TK: Tensor) -> tuple[Tensor, Tensor]:
    """Each pair's output, sorted by expert, and at which of them a pair is.

    A pair whose expert is -1 comes last, with an output of any value.
    """
    from plait_kernels.moe.first_rows_triton import silu_mul_first_rows, take_first_rows

    num_experts = len(gate_up_EJH)
    order_N, index_N, ends_E = _sort_pairs(torch.where(experts_TK < 0, num_experts, experts_TK), num_experts)
    sorted_x_NH = take_first_rows(x_TH, order_N, experts_TK.shape[1], ends_E[-1:])
    gate_up_NJ = F.grouped_mm(sorted_x_NH, gate_up_EJH.transpose(1, 2), offs=ends_E)
    gated_NI = silu_mul_first_rows(gate_up_NJ, ends_E[-1:])
    return F.grouped_mm(gated_NI, down_EHI.transpose(1, 2), offs=ends_E), index_N


def _sort_pairs(experts_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Pairs by expert; at which of those a pair is; where each expert's end. An id of E is nobody's."""
    # A byte is sorted in one pass, an int64 in eight.
    kind = torch.uint8 if num_experts < 256 else torch.int16
    sorted_N, order_N = experts_TK.flatten().to(kind).sort(stable=True)
    every_E = torch.arange(num_experts, dtype=kind, device=experts_TK.device)
    ends_E = torch.searchsorted(sorted_N, every_E, right=True, out_int32=True)
    index_N = torch.empty_like(order_N).index_copy_(0, order_N, torch.arange(len(order_N), device=experts_TK.device))
    return order_N, index_N, ends_E
