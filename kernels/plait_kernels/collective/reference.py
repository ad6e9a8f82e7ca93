"""All-reduce, residual and RMS norm, and the largest logit, in torch.

Shapes: N rows, D the width, U a rank's shard of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from plait_kernels.norm.reference import rms_norm


def add_partials_rms_norm(
    partials_ND: Sequence[Tensor], residual_ND: Tensor, weight_D: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """``(rms_norm(sum), sum)`` of all ranks' partial sums and the residual.

    The sum is taken in float32, in rank order and the residual last, and rounded before it is normalised.
    """
    sum_ND = torch.zeros_like(residual_ND, dtype=torch.float32)
    for partial_ND in (*partials_ND, residual_ND):
        sum_ND = sum_ND + partial_ND.float()
    rounded_ND = sum_ND.to(residual_ND.dtype)
    return rms_norm(rounded_ND, weight_D, eps), rounded_ND


def largest_logit(shards_NU: Sequence[Tensor]) -> Tensor:
    """The id of each row's largest logit over the ranks' shards, the lowest of equals: int64 ``[N]``."""
    return torch.cat([shard_NU.float() for shard_NU in shards_NU], dim=1).argmax(dim=1)
