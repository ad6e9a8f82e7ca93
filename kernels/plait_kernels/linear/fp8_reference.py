"""FP8 GEMM and quantised rows in torch. Shapes: N rows, I inputs, O outputs."""

from __future__ import annotations

import torch
from torch import Tensor

from plait_kernels.activation import reference as activation
from plait_kernels.linear import fp8
from plait_kernels.linear.fp8 import Fp8Rows, Fp8Weight
from plait_kernels.linear.reference import RowNorm
from plait_kernels.norm import reference as norms


def quantise_rows(x_NI: Tensor, *, is_grouped: bool) -> Fp8Rows:
    """See ``plait_kernels.linear.quantise_rows``."""
    return fp8.quantise_rows(x_NI, is_grouped=is_grouped)


def rmsnorm_quantise(x_NI: Tensor, norm: RowNorm, *, is_grouped: bool) -> tuple[Fp8Rows, Tensor]:
    """See ``plait_kernels.linear.rmsnorm_quantise``; the norm is not rounded before."""
    sum_NI = norm.residual_1I + x_NI
    normed_NI = norms.rms_norm(sum_NI.float(), norm.weight_I.float(), norm.eps)
    return quantise_rows(normed_NI, is_grouped=is_grouped), sum_NI


def add_rms_norm_quantise(x_NI: Tensor, norm: RowNorm, *, is_grouped: bool) -> tuple[Tensor, Fp8Rows, Tensor]:
    """See ``plait_kernels.linear.add_rms_norm_quantise``."""
    normed_NI, sum_NI = norms.add_rms_norm(x_NI, *norm)
    return normed_NI, quantise_rows(normed_NI, is_grouped=is_grouped), sum_NI


def silu_mul_quantise(gate_up_N2I: Tensor, *, is_grouped: bool) -> Fp8Rows:
    """See ``plait_kernels.linear.silu_mul_quantise``."""
    return quantise_rows(activation.silu_mul(gate_up_N2I.float()), is_grouped=is_grouped)


def fp8_gemm(rows: Fp8Rows, weight: Fp8Weight, _tile: object, out_NO: Tensor) -> Tensor:
    """See ``plait_kernels.linear.fp8_gemm``."""
    return torch.Tensor.copy_(out_NO, rows.dequantised() @ weight.dequantised().T)


def fp8_gate_up_silu(rows: Fp8Rows, gate_up: Fp8Weight, _tile: object, out_NO: Tensor) -> Tensor:
    """See ``plait_kernels.linear.fp8_gate_up_silu``."""
    return torch.Tensor.copy_(out_NO, activation.silu_mul(rows.dequantised() @ gate_up.dequantised().T))
