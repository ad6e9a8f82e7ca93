"""Joining attention over parts of a context. Shapes: T tokens, H heads, D numbers in a value."""

from __future__ import annotations

import torch
from torch import Tensor

from plait_kernels.solutions import triton_solution


def merge(a_THD: Tensor, lse_a_TH: Tensor, b_THD: Tensor, lse_b_TH: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over both parts, float32 ``[T, H, D]``, and its log-sum-exp, float32 ``[T, H]``.

    Log-sum-exps are base 2, and -inf where a row sees nothing of a part; a row that sees nothing of
    either gets 0 and -inf. The outputs given must be finite everywhere.
    """
    if a_THD.is_cuda:
        out_THD, lse_TH = triton_solution("plait_kernels.attention", "merge_triton").merge(
            a_THD, lse_a_TH, b_THD, lse_b_TH
        )
        return out_THD, lse_TH
    top_TH = torch.maximum(lse_a_TH, lse_b_TH)
    # Of two empty parts the difference would be inf - inf.
    shift_TH = top_TH.masked_fill(top_TH == -torch.inf, 0.0)
    weight_a_TH, weight_b_TH = (lse_a_TH - shift_TH).exp2(), (lse_b_TH - shift_TH).exp2()
    total_TH = weight_a_TH + weight_b_TH
    sum_THD = a_THD.float() * weight_a_TH[..., None] + b_THD.float() * weight_b_TH[..., None]
    return sum_THD / total_TH.masked_fill(total_TH == 0, 1.0)[..., None], shift_TH + total_TH.log2()
