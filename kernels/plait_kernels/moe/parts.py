"""Experts of which others are elsewhere: the outputs of the pairs of a row and an expert that is here.

Shapes: G rows, E experts here, K experts a row, H the hidden size, N = G K pairs of row and expert.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from plait_kernels.moe import reference

MAX_INDEXED, MAX_LISTED = 2, 2048
"""As ``plait_kernels.moe``'s, of the rows of one rank."""


@dataclass(frozen=True, slots=True)
class RowParts:
    """What the experts here made of rows; weighted and summed, they are these experts' part of the rows' sums."""

    parts: Tensor
    """Of each pair, ``[N, H]``, of which those of other experts have any value; or the rows' sums, ``[G, H]``."""
    index_N: Tensor | None = None
    """int64: at which of the parts a pair is; None if they are in order."""
    is_summed: bool = False


@dataclass(frozen=True, slots=True)
class ExpertStack:
    """Experts as two tensors: ``[E, J, H]``, gate rows first, and ``[E, H, I]``."""

    gate_up_EJH: Tensor
    down_EHI: Tensor

    def __call__(self, x_TH: Tensor, weights_TK: Tensor, experts_TK: Tensor) -> Tensor:
        """See ``plait_kernels.moe.expert_mlps``."""
        from plait_kernels.moe import expert_mlps

        return expert_mlps(x_TH, self.gate_up_EJH, self.down_EHI, weights_TK, experts_TK)

    def parts(self, x_GH: Tensor, weights_GK: Tensor, experts_GK: Tensor, num_ranks: int) -> RowParts:
        """The outputs of the experts here; an id of -1 is another's.

        About one of ``num_ranks`` pairs is expected to be here.
        """
        experts = self.gate_up_EJH, self.down_EHI
        num_rows = len(x_GH) // num_ranks
        if not x_GH.is_cuda or x_GH.dtype not in (torch.bfloat16, torch.float16):
            return RowParts(reference.expert_parts(x_GH, *experts, experts_GK))
        if num_rows > MAX_LISTED and x_GH.dtype == torch.bfloat16:
            from plait_kernels.moe import grouped_gemm_torch

            return RowParts(*grouped_gemm_torch.expert_parts(x_GH, *experts, experts_GK))
        from plait_kernels.moe import grouped_gemm_triton, indexed_gemv_triton

        if num_rows <= MAX_INDEXED:
            sums_GH = indexed_gemv_triton.expert_mlps(x_GH, *experts, weights_GK, experts_GK, is_partial=True)
            return RowParts(sums_GH, is_summed=True)
        pairs_per_expert = experts_GK.numel() / num_ranks / len(self.down_EHI)
        return RowParts(grouped_gemm_triton.expert_parts(x_GH, *experts, experts_GK, pairs_per_expert))
