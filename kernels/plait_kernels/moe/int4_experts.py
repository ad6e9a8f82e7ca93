"""Experts whose weights stay 4 bits.

Shapes: T tokens, G rows of all ranks, E experts, K experts a token, H the hidden size, I an expert's width, J = 2 I.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from plait_kernels.linear.int4 import Int4Weight, stack
from plait_kernels.moe import reference
from plait_kernels.moe.parts import RowParts


@dataclass(frozen=True, slots=True)
class Int4Experts:
    """``[E, J, H]``, gate rows first, and ``[E, H, I]``, each as a stack of matrices."""

    gate_up_EJH: Int4Weight
    down_EHI: Int4Weight

    def __call__(self, x_TH: Tensor, weights_TK: Tensor, experts_TK: Tensor) -> Tensor:
        """See ``plait_kernels.moe.expert_mlps``."""
        if not x_TH.is_cuda:
            parts_NH = reference_parts(x_TH, self.gate_up_EJH, self.down_EHI, experts_TK)
            return torch.einsum("tkh,tk->th", parts_NH.unflatten(0, experts_TK.shape), weights_TK).to(x_TH.dtype)
        from plait_kernels.moe.grouped_gemm_triton import combine

        parts_NH = self._parts(x_TH, experts_TK, 1)
        out_TH = torch.empty_like(x_TH)
        combine(parts_NH, weights_TK, out_TH)
        return out_TH

    def parts(self, x_GH: Tensor, _weights_GK: Tensor, experts_GK: Tensor, num_ranks: int) -> RowParts:
        """See ``ExpertStack.parts``."""
        if not x_GH.is_cuda:
            return RowParts(reference_parts(x_GH, self.gate_up_EJH, self.down_EHI, experts_GK).to(x_GH.dtype))
        return RowParts(self._parts(x_GH, experts_GK, num_ranks))

    def _parts(self, x_TH: Tensor, experts_TK: Tensor, num_ranks: int) -> Tensor:
        from plait_kernels.moe import int4_grouped_gemm_triton

        pairs_per_expert = experts_TK.numel() / num_ranks / len(self.down_EHI.codes)
        return int4_grouped_gemm_triton.expert_parts(
            x_TH, self.gate_up_EJH, self.down_EHI, experts_TK, pairs_per_expert
        )


def stack_int4(experts: Iterable[tuple[Int4Weight, Int4Weight]]) -> Int4Experts:
    """From gate and up, then down, of each; all are alike, and their inputs in order."""
    gate_up, down = zip(*experts, strict=True)
    return Int4Experts(stack(gate_up), stack(down))


def reference_parts(x_TH: Tensor, gate_up_EJH: Int4Weight, down_EHI: Int4Weight, experts_TK: Tensor) -> Tensor:
    """Each pair's output, float32 ``[T K, H]``; that of a pair whose expert is -1 has any value."""
    gate_up, down = (
        torch.stack([each.one(expert).dequantised() for expert in range(len(each.codes))])
        for each in (gate_up_EJH, down_EHI)
    )
    return reference.expert_parts(x_TH.float(), gate_up, down, experts_TK)
