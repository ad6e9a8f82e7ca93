"""GEMMs of one row or a few, with what is fused into them. Shapes: N rows, I inputs, O outputs."""

from __future__ import annotations

from torch import Tensor

from plait_kernels.backends import Backend, Op, on_device
from plait_kernels.linear.gemm_tuning import Tile
from plait_kernels.linear.reference import RowNorm

_FAMILY = "plait_kernels.linear"
_REFERENCE = Backend("reference")
_GEMV = Backend("gemv_triton", (on_device("cuda"),))
_gemv = Op(_FAMILY, "gemv", _GEMV, _REFERENCE)
_rmsnorm_gemv = Op(_FAMILY, "rmsnorm_gemv", _GEMV, _REFERENCE)
_gate_up_silu = Op(_FAMILY, "gate_up_silu", _GEMV, _REFERENCE)
_rmsnorm_gate_up_silu = Op(_FAMILY, "rmsnorm_gate_up_silu", _GEMV, _REFERENCE)
_rmsnorm_router_gemv = Op(
    _FAMILY, "rmsnorm_router_gemv", Backend("router_gemv_triton", (on_device("cuda"),)), _REFERENCE
)
_skinny_gemm = Op(_FAMILY, "skinny_gemm", Backend("skinny_gemm_triton", (on_device("cuda"),)), _REFERENCE)


def gemv(x_1I: Tensor, weight_OI: Tensor, out_1O: Tensor | None = None) -> Tensor:
    """``x @ weight^T`` of shape ``[1, O]`` in the dtype of ``x``, summed in float32; written to ``out_1O`` if given."""
    given_1O: Tensor = _gemv(x_1I)(x_1I, weight_OI, out_1O)
    return given_1O


def rmsnorm_gemv(x_1I: Tensor, norm: RowNorm, weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    """``rms_norm(x + residual) @ weight^T`` of shape ``[1, O]``, and ``x + residual``."""
    out_1O, sum_1I = _rmsnorm_gemv(x_1I)(x_1I, norm, weight_OI)
    return out_1O, sum_1I


def gate_up_silu(x_1I: Tensor, gate_up_OI: Tensor) -> Tensor:
    """``silu(gate) * up`` of the two halves of ``gemv``'s output, ``[1, O / 2]``."""
    gated_1O: Tensor = _gate_up_silu(x_1I)(x_1I, gate_up_OI)
    return gated_1O


def rmsnorm_gate_up_silu(x_1I: Tensor, norm: RowNorm, gate_up_OI: Tensor) -> tuple[Tensor, Tensor]:
    """``silu(gate) * up`` of the two halves of ``rmsnorm_gemv``'s output, ``[1, O / 2]``, and ``x + residual``."""
    gated_1O, sum_1I = _rmsnorm_gate_up_silu(x_1I)(x_1I, norm, gate_up_OI)
    return gated_1O, sum_1I


def rmsnorm_router_gemv(x_1I: Tensor, norm: RowNorm, weight_OI: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``rms_norm(x + residual) @ weight^T``, float32 ``[1, O]``; that norm in the dtype of ``x``; ``x + residual``."""
    logits_1O, normed_1I, sum_1I = _rmsnorm_router_gemv(x_1I)(x_1I, norm, weight_OI)
    return logits_1O, normed_1I, sum_1I


def skinny_gemm(x_NI: Tensor, weight_OI: Tensor, tile: Tile, out_NO: Tensor | None = None) -> Tensor:
    """``x @ weight^T`` of shape ``[N, O]`` for up to 64 rows; written to ``out_NO`` if given.

    ``tile`` is one that ``tiles_of`` gives for so many rows.
    """
    given_NO: Tensor = _skinny_gemm(x_NI)(x_NI, weight_OI, tile, out_NO)
    return given_NO
