"""Experts whose weights stay FP8.

Shapes: T tokens, G rows of all ranks, E experts, K experts a token, H the hidden size, I an expert's width, J = 2 I.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from plait_kernels.linear.fp8 import FP8, Fp8Rows, Fp8Weight, quantise_rows
from plait_kernels.linear.fp8_reference import silu_mul_quantise
from plait_kernels.moe.parts import MAX_INDEXED, RowParts

_MAX_FEW = 12
"""Pairs of an expert on the average."""


@dataclass(frozen=True, slots=True)
class Fp8Experts:
    """``[E, J, H]``, gate rows first, and ``[E, H, I]``, each as a stack of matrices with their scales."""

    gate_up_EJH: Fp8Weight
    down_EHI: Fp8Weight

    @property
    def is_grouped(self) -> bool:
        """Whether rows are quantised with a scale for each group."""
        return self.gate_up_EJH.block_rows > 0

    @staticmethod
    def takes_rows(num_tokens: int) -> bool:
        """Whether so many tokens may be given quantised; one or two are not."""
        return num_tokens > MAX_INDEXED

    def __call__(self, x_TH: Tensor, weights_TK: Tensor, experts_TK: Tensor, rows: Fp8Rows | None = None) -> Tensor:
        """See ``plait_kernels.moe.expert_mlps``; ``rows`` are ``x_TH`` if it has been quantised."""
        experts = self.gate_up_EJH, self.down_EHI
        pairs_per_expert = experts_TK.numel() / len(self.down_EHI.stored_OI)
        if not x_TH.is_cuda:
            parts_NH = reference_parts(x_TH, *experts, experts_TK, pairs_per_expert, rows)
            return torch.einsum("tkh,tk->th", parts_NH.unflatten(0, experts_TK.shape), weights_TK).to(x_TH.dtype)
        if not self.takes_rows(len(x_TH)):
            from plait_kernels.moe import indexed_gemv_triton

            return indexed_gemv_triton.expert_mlps(x_TH, *experts, weights_TK, experts_TK)
        from plait_kernels.moe import fp8_grouped_gemm_triton
        from plait_kernels.moe.grouped_gemm_triton import combine

        out_TH = torch.empty_like(x_TH)
        parts_NH = fp8_grouped_gemm_triton.expert_parts(x_TH, *experts, experts_TK, pairs_per_expert, rows)
        combine(parts_NH, weights_TK, out_TH)
        return out_TH

    def parts(self, x_GH: Tensor, weights_GK: Tensor, experts_GK: Tensor, num_ranks: int) -> RowParts:
        """See ``ExpertStack.parts``."""
        experts = self.gate_up_EJH, self.down_EHI
        pairs_per_expert = experts_GK.numel() / num_ranks / len(self.down_EHI.stored_OI)
        if not x_GH.is_cuda:
            return RowParts(reference_parts(x_GH, *experts, experts_GK, pairs_per_expert).to(x_GH.dtype))
        from plait_kernels.moe import fp8_grouped_gemm_triton, indexed_gemv_triton

        if len(x_GH) // num_ranks <= MAX_INDEXED:
            sums_GH = indexed_gemv_triton.expert_mlps(x_GH, *experts, weights_GK, experts_GK, is_partial=True)
            return RowParts(sums_GH, is_summed=True)
        return RowParts(fp8_grouped_gemm_triton.expert_parts(x_GH, *experts, experts_GK, pairs_per_expert))


def stack_fp8(experts: Iterable[tuple[Fp8Weight, Fp8Weight]]) -> Fp8Experts:
    """From gate and up, then down, of each. Raises ``ValueError`` unless all have scales of the same kind."""
    gate_up, down = zip(*experts, strict=True)
    if len({weight.block_rows > 0 for weight in (*gate_up, *down)}) > 1:
        raise ValueError("experts of one layer have scales of blocks and of outputs")
    return Fp8Experts(_stacked(gate_up), _stacked(down))


def _stacked(weights: Sequence[Fp8Weight]) -> Fp8Weight:
    stored = torch.stack([weight.stored_OI.view(torch.uint8) for weight in weights]).view(FP8)
    return Fp8Weight(stored, torch.stack([weight.scale for weight in weights]), weights[0].block_rows)


def has_few_rows(num_pairs_per_expert: float) -> bool:
    """Whether the gate is in the first GEMM, by the mean length of an expert's list.

    Rows then enter the second with a scale for each group, also if weights have one for each output. For more rows
    the two accumulators of a larger tile would cost the GEMMs more than the kernel between them.
    """
    return num_pairs_per_expert <= _MAX_FEW


def reference_parts(
    x_TH: Tensor,
    gate_up_EJH: Fp8Weight,
    down_EHI: Fp8Weight,
    experts_TK: Tensor,
    num_pairs_per_expert: float,
    rows: Fp8Rows | None = None,
) -> Tensor:
    """Each pair's output, float32 ``[T K, H]``; zeros where its expert is -1."""
    num_tokens, top_k = experts_TK.shape
    is_grouped = gate_up_EJH.block_rows > 0
    is_gated_grouped = is_grouped or has_few_rows(num_pairs_per_expert)
    x_TH = (quantise_rows(x_TH, is_grouped=is_grouped) if rows is None else rows).dequantised()
    parts_NH = x_TH.new_zeros(num_tokens * top_k, x_TH.shape[1])
    for expert in range(len(down_EHI.stored_OI)):
        pairs = (experts_TK.flatten() == expert).nonzero()[:, 0]
        gate_up_NJ = x_TH[pairs // top_k] @ gate_up_EJH.one(expert).dequantised().T
        gated = silu_mul_quantise(gate_up_NJ, is_grouped=is_gated_grouped).dequantised()
        parts_NH[pairs] = gated @ down_EHI.one(expert).dequantised().T
    return parts_NH
