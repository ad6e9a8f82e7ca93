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
    num_tokens, top_k = experts_TK.shape
    sorted_N, order_N = experts_TK.flatten().sort(stable=True)
    every_E = torch.arange(gate_up_EJH.shape[0], device=x_TH.device)
    ends_E = torch.searchsorted(sorted_N, every_E, right=True, out_int32=True)
    gate_up_NJ = F.grouped_mm(x_TH[order_N // top_k], gate_up_EJH.transpose(1, 2), offs=ends_E)
    sorted_NH = F.grouped_mm(silu_mul(gate_up_NJ), down_EHI.transpose(1, 2), offs=ends_E)
    out_NH = torch.empty_like(sorted_NH).index_copy_(0, order_N, sorted_NH)
    out_TKH = out_NH.view(num_tokens, top_k, -1).float()
    return (out_TKH * weights_TK[:, :, None]).sum(dim=1).to(x_TH.dtype)
