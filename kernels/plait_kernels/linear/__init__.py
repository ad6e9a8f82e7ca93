"""Products with a weight matrix that is held for many calls."""

from __future__ import annotations

from torch import Tensor

from plait_kernels.backends import Backend, Op, on
from plait_kernels.linear.blocks import GgufWeight
from plait_kernels.linear.gemm_tuning import Tile, tiles_for, tiles_of, tuning_file
from plait_kernels.linear.native import GgufMatrix, NativeMatrix, PanelMatrix, can_hold
from plait_kernels.linear.reference import RowNorm

_REFERENCE = Backend("reference")
_GEMV = Backend("gemv_triton", (on("cuda"),))
_gemv = Op(__name__, "gemv", _GEMV, _REFERENCE)
_rmsnorm_gemv = Op(__name__, "rmsnorm_gemv", _GEMV, _REFERENCE)
_rmsnorm_gate_up_silu = Op(__name__, "rmsnorm_gate_up_silu", _GEMV, _REFERENCE)
_rmsnorm_router_gemv = Op(__name__, "rmsnorm_router_gemv", Backend("router_gemv_triton", (on("cuda"),)), _REFERENCE)
_skinny_gemm = Op(__name__, "skinny_gemm", Backend("skinny_gemm_triton", (on("cuda"),)), _REFERENCE)


def gemv(x_1I: Tensor, weight_OI: Tensor, out_1O: Tensor | None = None) -> Tensor:
    """``x @ weight^T`` of shape ``[1, O]`` in the dtype of ``x``, summed in float32: all that a single stream needs.

    Written to ``out_1O`` where it is given.
    """
    product_1O: Tensor = _gemv(x_1I)(x_1I, weight_OI, out_1O)
    return product_1O


def rmsnorm_gemv(x_1I: Tensor, norm: RowNorm, weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    """``rms_norm(x + residual) @ weight^T`` of shape ``[1, O]``, and ``x + residual``."""
    product_1O, sum_1I = _rmsnorm_gemv(x_1I)(x_1I, norm, weight_OI)
    return product_1O, sum_1I


def rmsnorm_gate_up_silu(x_1I: Tensor, norm: RowNorm, gate_up_OI: Tensor) -> tuple[Tensor, Tensor]:
    """``silu(gate) * up`` of the two halves of that product, ``[1, O / 2]``, and ``x + residual``."""
    gated_1O, sum_1I = _rmsnorm_gate_up_silu(x_1I)(x_1I, norm, gate_up_OI)
    return gated_1O, sum_1I


def rmsnorm_router_gemv(x_1I: Tensor, norm: RowNorm, weight_OI: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``rms_norm(x + residual) @ weight^T``, float32 ``[1, O]``; that norm, rounded as it is multiplied; the sum."""
    logits_1O, normed_1I, sum_1I = _rmsnorm_router_gemv(x_1I)(x_1I, norm, weight_OI)
    return logits_1O, normed_1I, sum_1I


def skinny_gemm(x_NI: Tensor, weight_OI: Tensor, tile: Tile, out_NO: Tensor | None = None) -> Tensor:
    """``x @ weight^T`` of shape ``[N, O]`` for a few rows on a GPU, by a tile that ``tiles_of`` gives for so many.

    Written to ``out_NO`` where it is given.
    """
    product_NO: Tensor = _skinny_gemm(x_NI)(x_NI, weight_OI, tile, out_NO)
    return product_NO


__all__ = [
    "GgufMatrix",
    "GgufWeight",
    "NativeMatrix",
    "PanelMatrix",
    "RowNorm",
    "Tile",
    "can_hold",
    "gemv",
    "rmsnorm_gate_up_silu",
    "rmsnorm_gemv",
    "rmsnorm_router_gemv",
    "skinny_gemm",
    "tiles_for",
    "tiles_of",
    "tuning_file",
]
