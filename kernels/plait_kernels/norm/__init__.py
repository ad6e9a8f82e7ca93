"""Root-mean-square normalisation (arXiv 1910.07467)."""

from __future__ import annotations

from torch import Tensor

from plait_kernels.backends import Backend, Op, on_device
from plait_kernels.norm.reference import rms_norm

_add_rms_norm = Op(__name__, "add_rms_norm", Backend("triton", (on_device("cuda"),)), Backend("reference"))


def add_rms_norm(x_ND: Tensor, residual_ND: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``(rms_norm(x + residual), x + residual)``: a layer's output joins the residual stream."""
    normed_ND, sum_ND = _add_rms_norm(x_ND)(x_ND, residual_ND, weight_D, eps)
    return normed_ND, sum_ND


__all__ = ["add_rms_norm", "rms_norm"]
