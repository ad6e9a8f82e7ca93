"""Experts in FP8 with a scale for each output, for many tokens, by torch's grouped GEMM.

Rows have one scale each. Shapes: T tokens, E experts, K experts a token, H the hidden size, N = T K pairs of token and
expert.
"""

from __future__ import annotations

import torch
from torch import Tensor

from plait_kernels.linear.fp8 import FP8, Fp8Rows, Fp8Weight
from plait_kernels.linear.gemm import quantise_rows, silu_mul_quantise
from plait_kernels.moe.grouped_gemm_torch import sort_pairs


def expert_parts(
    x_TH: Tensor, gate_up_EJH: Fp8Weight, down_EHI: Fp8Weight, experts_TK: Tensor
) -> tuple[Tensor, Tensor]:
    """Each pair's output, sorted by expert, and at which of them a pair is; every pair's expert is here."""
    order_N, index_N, ends_E = sort_pairs(experts_TK, len(down_EHI.stored_OI))
    rows, row_N = quantise_rows(x_TH, is_grouped=False), order_N // experts_TK.shape[1]
    sorted_NH = rows.stored_NI.view(torch.uint8)[row_N].view(FP8)
    gate_up_NJ = _grouped_mm(Fp8Rows(sorted_NH, rows.scale[row_N]), gate_up_EJH, ends_E, x_TH.dtype)
    gated = silu_mul_quantise(gate_up_NJ, is_grouped=False)
    return _grouped_mm(gated, down_EHI, ends_E, x_TH.dtype), index_N


def _grouped_mm(rows: Fp8Rows, weight: Fp8Weight, ends_E: Tensor, dtype: torch.dtype) -> Tensor:
    return torch._scaled_grouped_mm(
        rows.stored_NI,
        weight.stored_OI.transpose(1, 2),
        rows.scale.flatten(),
        weight.scale,
        offs=ends_E,
        out_dtype=dtype,
        use_fast_accum=False,
    )
