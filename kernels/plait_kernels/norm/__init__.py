"""Root-mean-square normalisation (arXiv 1910.07467)."""

from __future__ import annotations

from torch import Tensor

from plait_kernels.backends import triton_backend
from plait_kernels.norm import reference
from plait_kernels.norm.reference import rms_norm


def add_rms_norm(x_ND: Tensor, residual_ND: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``(rms_norm(x + residual), x + residual)``: a layer's output joins the residual stream on its way on."""
    backend = triton_backend(__name__) if x_ND.is_cuda else reference
    normed_ND, sum_ND = backend.add_rms_norm(x_ND, residual_ND, weight_D, eps)
    return normed_ND, sum_ND


__all__ = ["add_rms_norm", "rms_norm"]
