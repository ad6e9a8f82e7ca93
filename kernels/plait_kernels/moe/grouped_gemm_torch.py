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

    sorted_NH, index_N = expert_parts(x_TH, gate_up_EJH, down_EHI, experts_TK)
    out_TH = torch.empty_like(x_TH)
    combine(sorted_NH, weights_TK, out_TH, index_N)
    return out_TH


def expert_parts(x_TH: Tensor, gate_up_EJH: Tensor, down_EHI: Tensor, experts_TK: Tensor) -> tuple[Tensor, Tensor]:
    """Each pair's output, sorted by expert, and at which of them a pair is. A pair whose expert is -1 comes last,
    with an output of any value.
    """
    top_k, num_experts = experts_TK.shape[1], len(gate_up_EJH)
    # A byte is sorted in one pass, an int64 in eight.
    kind = torch.uint8 if num_experts < 256 else torch.int16
    experts_N = experts_TK.flatten()
    sorted_N, order_N = torch.where(experts_N < 0, num_experts, experts_N).to(kind).sort(stable=True)
    every_E = torch.arange(num_experts, dtype=kind, device=x_TH.device)
    ends_E = torch.searchsorted(sorted_N, every_E, right=True, out_int32=True)
    gate_up_NJ = F.grouped_mm(x_TH[order_N // top_k], gate_up_EJH.transpose(1, 2), offs=ends_E)
    sorted_NH = F.grouped_mm(silu_mul(gate_up_NJ), down_EHI.transpose(1, 2), offs=ends_E)
    index_N = torch.empty_like(order_N).index_copy_(0, order_N, torch.arange(len(order_N), device=x_TH.device))
    return sorted_NH, index_N
