"""Products with a weight matrix that is held for many calls."""

from __future__ import annotations

from torch import Tensor

from plait_kernels.backends import triton_backend
from plait_kernels.linear import reference
from plait_kernels.linear.blocks import GgufWeight
from plait_kernels.linear.gemm_tuning import TABLE, Tile, tiles_of
from plait_kernels.linear.native import GgufMatrix, NativeMatrix, PanelMatrix, can_hold
from plait_kernels.linear.reference import RowNorm


def gemv(x_1I: Tensor, weight_OI: Tensor, out_1O: Tensor | None = None) -> Tensor:
    """``x @ weight^T`` of shape ``[1, O]`` in the dtype of ``x``, summed in float32: all that a single stream needs.

    Written to ``out_1O`` where it is given.
    """
    backend = triton_backend(__name__, "gemv_triton") if x_1I.is_cuda else reference
    product_1O: Tensor = backend.gemv(x_1I, weight_OI, out_1O)
    return product_1O


def rmsnorm_gemv(x_1I: Tensor, norm: RowNorm, weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    """``rms_norm(x + residual) @ weight^T`` of shape ``[1, O]``, and ``x + residual``."""
    backend = triton_backend(__name__, "gemv_triton") if x_1I.is_cuda else reference
    product_1O, sum_1I = backend.rmsnorm_gemv(x_1I, norm, weight_OI)
    return product_1O, sum_1I


def rmsnorm_gate_up_silu(x_1I: Tensor, norm: RowNorm, gate_up_OI: Tensor) -> tuple[Tensor, Tensor]:
    """``silu(gate) * up`` of the two halves of that product, ``[1, O / 2]``, and ``x + residual``."""
    backend = triton_backend(__name__, "gemv_triton") if x_1I.is_cuda else reference
    gated_1O, sum_1I = backend.rmsnorm_gate_up_silu(x_1I, norm, gate_up_OI)
    return gated_1O, sum_1I


def rmsnorm_router_gemv(x_1I: Tensor, norm: RowNorm, weight_OI: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``rms_norm(x + residual) @ weight^T``, float32 ``[1, O]``; that norm, rounded as it is multiplied; the sum."""
    backend = triton_backend(__name__, "router_gemv_triton") if x_1I.is_cuda else reference
    logits_1O, normed_1I, sum_1I = backend.rmsnorm_router_gemv(x_1I, norm, weight_OI)
    return logits_1O, normed_1I, sum_1I


def skinny_gemm(x_NI: Tensor, weight_OI: Tensor, tile: Tile, out_NO: Tensor | None = None) -> Tensor:
    """``x @ weight^T`` of shape ``[N, O]`` for a few rows on a GPU, by a tile that ``tiles_of`` gives for so many.

    Written to ``out_NO`` where it is given.
    """
    product_NO: Tensor = triton_backend(__name__, "skinny_gemm_triton").skinny_gemm(x_NI, weight_OI, tile, out_NO)
    return product_NO


__all__ = [
    "TABLE",
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
    "tiles_of",
]
