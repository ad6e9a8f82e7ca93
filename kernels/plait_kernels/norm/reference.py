"""RMS norm in torch. Shapes: N rows (tokens, or tokens and heads), D the normalised width."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def rms_norm(x_ND: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension, in the dtype of ``x``."""
    return F.rms_norm(x_ND, weight_D.shape, weight_D, eps)


def add_rms_norm(x_ND: Tensor, residual_ND: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See ``plait_kernels.norm.add_rms_norm``."""
    residual_ND = residual_ND + x_ND
    return rms_norm(residual_ND, weight_D, eps), residual_ND
