"""Experts in FP8 with a scale an output by torch's scaled grouped GEMM: many tokens, all experts in two calls.

Shapes: T tokens, E experts, K experts a token, H the hidden size, I an expert's width, J = 2 I, N = T K pairs of token
and expert.
"""

from __future__ import annotations

import torch
from torch import Tensor

from plait_kernels.linear.fp8 import MAX_FAST_INPUTS, Fp8Rows, Fp8Weight
from plait_kernels.linear.fp8_quantise_triton import quantise_rows, silu_mul_quantise
from plait_kernels.moe.grouped_gemm_torch import sort_pairs
from plait_kernels.moe.grouped_gemm_triton import combine

MIN_TOKENS = 1024
"""From which on it is faster than lists of pairs, measured on an H200."""


def is_faster(num_tokens: int, gate_up_EJH: Fp8Weight, down_EHI: Fp8Weight) -> bool:
    """Whether these experts can be multiplied so, and so many tokens should be."""
    return num_tokens >= MIN_TOKENS and not gate_up_EJH.block_rows and not down_EHI.block_rows


def expert_mlps(
    x_TH: Tensor, gate_up_EJH: Fp8Weight, down_EHI: Fp8Weight, weights_TK: Tensor, experts_TK: Tensor
) -> Tensor:
    """See ``plait_kernels.moe.expert_mlps``."""
    order_N, index_N, ends_E = sort_pairs(experts_TK, len(gate_up_EJH.stored_OI))
    x = quantise_rows(x_TH, is_grouped=False)
    token_N = order_N // experts_TK.shape[1]
    gate_up_NJ = _grouped_gemm(Fp8Rows(x.stored_NI[token_N], x.scale[token_N]), gate_up_EJH, ends_E)
    sorted_NH = _grouped_gemm(silu_mul_quantise(gate_up_NJ, is_grouped=False), down_EHI, ends_E)
    out_TH = torch.empty_like(x_TH)
    combine(sorted_NH, weights_TK, out_TH, index_N)
    return out_TH


def _grouped_gemm(rows: Fp8Rows, weight: Fp8Weight, ends_E: Tensor) -> Tensor:
    """bfloat16 ``[N, O]``; rows of an expert end at ``ends_E``."""
    return torch._scaled_grouped_mm(
        rows.stored_NI,
        weight.stored_OI.transpose(1, 2),
        rows.scale[:, 0],
        weight.scale,
        offs=ends_E,
        out_dtype=torch.bfloat16,
        use_fast_accum=weight.stored_OI.shape[2] <= MAX_FAST_INPUTS,
    )
