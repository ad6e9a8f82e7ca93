"""Joining attention over parts of a context. Shapes: T tokens, H heads, D numbers in a value."""

from __future__ import annotations

import torch
from torch import Tensor

from plait_kernels.backends import triton_backend


def merge(a_THD: Tensor, lse_a_TH: Tensor, b_THD: Tensor, lse_b_TH: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over both parts, float32 ``[T, H, D]``, and its log-sum-exp, float32 ``[T, H]``.

    Log-sum-exps are base 2, and -inf where a row sees nothing of a part; a row that sees nothing of
    either gets 0 and -inf. What is given for a row that sees nothing of a part is not read.
    """
    if a_THD.is_cuda:
        out_THD, lse_TH = triton_backend("plait_kernels.attention", "merge_triton").merge(
            a_THD, lse_a_TH, b_THD, lse_b_TH
        )
        return out_THD, lse_TH
    top_TH = torch.maximum(lse_a_TH, lse_b_TH)
    # Of two empty parts the difference would be inf - inf.
    shift_TH = top_TH.masked_fill(top_TH == -torch.inf, 0.0)
    weight_a_TH, weight_b_TH = (lse_a_TH - shift_TH).exp2(), (lse_b_TH - shift_TH).exp2()
    total_TH = weight_a_TH + weight_b_TH
    sum_THD = _weighted(a_THD, weight_a_TH) + _weighted(b_THD, weight_b_TH)
    return sum_THD / total_TH.masked_fill(total_TH == 0, 1.0)[..., None], shift_TH + total_TH.log2()


def merge_into(joined_THD: Tensor, lse_TH: Tensor, part_THD: Tensor, part_TH: Tensor) -> None:
    """``merge`` of what is joined so far with one more part: both are written, ``joined`` in its own dtype.

    Sums are float32; ``joined`` is so too where more parts follow, so that it is rounded once.
    """
    if joined_THD.is_cuda:
        backend = triton_backend("plait_kernels.attention", "merge_triton")
        backend.merge_into(joined_THD, lse_TH, part_THD, part_TH)
        return
    sum_THD, sum_TH = merge(joined_THD, lse_TH, part_THD, part_TH)
    joined_THD.copy_(sum_THD)
    lse_TH.copy_(sum_TH)


def _weighted(part_THD: Tensor, weight_TH: Tensor) -> Tensor:
    """0 where the weight is, even times what is no number."""
    weight_TH1 = weight_TH[..., None]
    return (part_THD.float() * weight_TH1).masked_fill(weight_TH1 == 0, 0.0)
