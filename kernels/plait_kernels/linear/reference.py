"""GEMV and skinny GEMM in torch. Shapes: N rows, I inputs, O outputs."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from plait_kernels.activation import reference as activation
from plait_kernels.linear.fp8 import Fp8Weight
from plait_kernels.norm import reference as norms


class RowNorm(NamedTuple):
    """The add and RMS norm before a GEMV: the row joins the residual stream, and the sum is normalised."""

    residual_1I: Tensor
    weight_I: Tensor
    eps: float


def gemv(x_1I: Tensor, weight_OI: Tensor | Fp8Weight, out_1O: Tensor | None = None, _tile: object = None) -> Tensor:
    """See ``plait_kernels.linear.gemv``."""
    given_1O = _matmul(x_1I, weight_OI)
    return given_1O if out_1O is None else torch.Tensor.copy_(out_1O, given_1O)


def skinny_gemm(x_NI: Tensor, weight_OI: Tensor, _tile: object, out_NO: Tensor | None = None) -> Tensor:
    """See ``plait_kernels.linear.skinny_gemm``."""
    return gemv(x_NI, weight_OI, out_NO)


def rmsnorm_gemv(
    x_1I: Tensor, norm: RowNorm, weight_OI: Tensor | Fp8Weight, _tile: object = None
) -> tuple[Tensor, Tensor]:
    """See ``plait_kernels.linear.rmsnorm_gemv``."""
    normed_1I, sum_1I = norms.add_rms_norm(x_1I, *norm)
    return _matmul(normed_1I, weight_OI), sum_1I


def gate_up_silu(x_1I: Tensor, gate_up_OI: Tensor | Fp8Weight, _tile: object = None) -> Tensor:
    """See ``plait_kernels.linear.gate_up_silu``."""
    return activation.silu_mul(_matmul(x_1I, gate_up_OI))


def rmsnorm_gate_up_silu(
    x_1I: Tensor, norm: RowNorm, gate_up_OI: Tensor | Fp8Weight, _tile: object = None
) -> tuple[Tensor, Tensor]:
    """See ``plait_kernels.linear.rmsnorm_gate_up_silu``."""
    gate_up_1O, sum_1I = rmsnorm_gemv(x_1I, norm, gate_up_OI)
    return activation.silu_mul(gate_up_1O), sum_1I


def router_gemv(x_1I: Tensor, weight_OI: Tensor) -> Tensor:
    """See ``plait_kernels.linear.router_gemv``."""
    return F.linear(x_1I.float(), weight_OI.float())


def router_gemm(x_NI: Tensor, weight_OI: Tensor) -> Tensor:
    """See ``plait_kernels.linear.router_gemm``."""
    return router_gemv(x_NI, weight_OI)


def rmsnorm_router_gemv(x_1I: Tensor, norm: RowNorm, weight_OI: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """See ``plait_kernels.linear.rmsnorm_router_gemv``."""
    normed_1I, sum_1I = norms.add_rms_norm(x_1I, *norm)
    return router_gemv(normed_1I, weight_OI), normed_1I, sum_1I


def _matmul(x_NI: Tensor, weight_OI: Tensor | Fp8Weight) -> Tensor:
    if isinstance(weight_OI, Fp8Weight):
        return (x_NI.float() @ weight_OI.dequantised().T).to(x_NI.dtype)
    return F.linear(x_NI, weight_OI)
