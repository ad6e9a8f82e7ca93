"""GEMMs of one row or a few, of FP8 and 4 bits, with what is fused into them. Shapes: N rows, I inputs, O outputs."""

from __future__ import annotations

from torch import Tensor

from plait_kernels.backends import Backend, Call, Op, on_device
from plait_kernels.linear.fp8 import Fp8Rows, Fp8Weight
from plait_kernels.linear.fp8_tiles import Fp8GemmTile, Fp8RowTile, Fp8WgmmaTile
from plait_kernels.linear.gemm_tuning import Tile
from plait_kernels.linear.int4 import Int4Weight
from plait_kernels.linear.int4_tiles import Int4Tile
from plait_kernels.linear.reference import RowNorm

MAX_ROUTER = (64, 256, 2048)
"""N, O and I of ``router_gemm``, which is made for a short wait: larger ones are work enough for cuBLAS."""
_FAMILY = "plait_kernels.linear"
_REFERENCE = Backend("reference")


def _takes_tile(call: Call) -> str | None:
    """``call.size`` is 1 for a tile of a CUDA kernel, 0 for one of Triton's or none."""
    return None if call.size else "takes tiles of its own"


_FP8_CUDA = Backend("fp8_gemm_cuda", (on_device("cuda"), _takes_tile))
_GEMV = Backend("gemv_triton", (on_device("cuda"),))
_gemv = Op(_FAMILY, "gemv", _FP8_CUDA, _GEMV, _REFERENCE)
_rmsnorm_gemv = Op(_FAMILY, "rmsnorm_gemv", _FP8_CUDA, _GEMV, _REFERENCE)
_gate_up_silu = Op(_FAMILY, "gate_up_silu", _FP8_CUDA, _GEMV, _REFERENCE)
_rmsnorm_gate_up_silu = Op(_FAMILY, "rmsnorm_gate_up_silu", _FP8_CUDA, _GEMV, _REFERENCE)
_ROUTER = Backend("router_gemv_triton", (on_device("cuda"),))
_router_gemv = Op(_FAMILY, "router_gemv", _ROUTER, _REFERENCE)
_rmsnorm_router_gemv = Op(_FAMILY, "rmsnorm_router_gemv", _ROUTER, _REFERENCE)
_router_gemm = Op(_FAMILY, "router_gemm", Backend("router_gemm_triton", (on_device("cuda"),)), _REFERENCE)
_FP8 = Backend("fp8_quantise_triton", (on_device("cuda"),))
_FP8_REFERENCE = Backend("fp8_reference")
_quantise_rows = Op(_FAMILY, "quantise_rows", _FP8, _FP8_REFERENCE)
_rmsnorm_quantise = Op(_FAMILY, "rmsnorm_quantise", _FP8, _FP8_REFERENCE)
_add_rms_norm_quantise = Op(_FAMILY, "add_rms_norm_quantise", _FP8, _FP8_REFERENCE)
_silu_mul_quantise = Op(_FAMILY, "silu_mul_quantise", _FP8, _FP8_REFERENCE)
_fp8_gemm = Op(_FAMILY, "fp8_gemm", _FP8_CUDA, Backend("fp8_gemm_triton", (on_device("cuda"),)), _FP8_REFERENCE)
_fp8_gate_up_silu = Op(_FAMILY, "fp8_gate_up_silu", _FP8_CUDA, _FP8_REFERENCE)
_INT4_REFERENCE = Backend("int4_reference")
_INT4 = Backend("int4_gemm_triton", (on_device("cuda"),))
_INT4_CUDA = Backend("int4_gemm_cuda", (on_device("cuda"), _takes_tile))
_int4_gemm = Op(_FAMILY, "int4_gemm", _INT4_CUDA, _INT4, _INT4_REFERENCE)
_int4_dequantise = Op(_FAMILY, "int4_dequantise", _INT4, _INT4_REFERENCE)
_skinny_gemm = Op(_FAMILY, "skinny_gemm", Backend("skinny_gemm_triton", (on_device("cuda"),)), _REFERENCE)


def gemv(
    x_1I: Tensor,
    weight_OI: Tensor | Fp8Weight,
    out_1O: Tensor | None = None,
    tile: Fp8RowTile | None = None,
) -> Tensor:
    """``x @ weight^T`` of shape ``[1, O]`` in the dtype of ``x``, summed in float32; written to ``out_1O`` if given.

    FP8 weights may have a ``tile``, here and below: ``fp8_tiles`` says which.
    """
    given_1O: Tensor = _gemv(x_1I, tile is not None)(x_1I, weight_OI, out_1O, tile)
    return given_1O


def rmsnorm_gemv(
    x_1I: Tensor, norm: RowNorm, weight_OI: Tensor | Fp8Weight, tile: Fp8RowTile | None = None
) -> tuple[Tensor, Tensor]:
    """``rms_norm(x + residual) @ weight^T`` of shape ``[1, O]``, and ``x + residual``."""
    out_1O, sum_1I = _rmsnorm_gemv(x_1I, tile is not None)(x_1I, norm, weight_OI, tile)
    return out_1O, sum_1I


def gate_up_silu(x_1I: Tensor, gate_up_OI: Tensor | Fp8Weight, tile: Fp8RowTile | None = None) -> Tensor:
    """``silu(gate) * up`` of the two halves of ``gemv``'s output, ``[1, O / 2]``."""
    gated_1O: Tensor = _gate_up_silu(x_1I, tile is not None)(x_1I, gate_up_OI, tile)
    return gated_1O


def rmsnorm_gate_up_silu(
    x_1I: Tensor, norm: RowNorm, gate_up_OI: Tensor | Fp8Weight, tile: Fp8RowTile | None = None
) -> tuple[Tensor, Tensor]:
    """``silu(gate) * up`` of the two halves of ``rmsnorm_gemv``'s output, ``[1, O / 2]``, and ``x + residual``."""
    gated_1O, sum_1I = _rmsnorm_gate_up_silu(x_1I, tile is not None)(x_1I, norm, gate_up_OI, tile)
    return gated_1O, sum_1I


def router_gemv(x_1I: Tensor, weight_OI: Tensor) -> Tensor:
    """``x @ weight^T``, float32 ``[1, O]``, of bfloat16."""
    logits_1O: Tensor = _router_gemv(x_1I)(x_1I, weight_OI)
    return logits_1O


def rmsnorm_router_gemv(x_1I: Tensor, norm: RowNorm, weight_OI: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``rms_norm(x + residual) @ weight^T``, float32 ``[1, O]``; that norm in the dtype of ``x``; ``x + residual``."""
    logits_1O, normed_1I, sum_1I = _rmsnorm_router_gemv(x_1I)(x_1I, norm, weight_OI)
    return logits_1O, normed_1I, sum_1I


def router_gemm(x_NI: Tensor, weight_OI: Tensor) -> Tensor:
    """``x @ weight^T``, float32 ``[N, O]``, of bfloat16 and ``MAX_ROUTER``'s rows, outputs and inputs at most."""
    logits_NO: Tensor = _router_gemm(x_NI)(x_NI, weight_OI)
    return logits_NO


def skinny_gemm(x_NI: Tensor, weight_OI: Tensor, tile: Tile, out_NO: Tensor | None = None) -> Tensor:
    """``x @ weight^T`` of shape ``[N, O]`` for up to 64 rows; written to ``out_NO`` if given.

    ``tile`` is one that ``tiles_of`` gives for so many rows.
    """
    given_NO: Tensor = _skinny_gemm(x_NI)(x_NI, weight_OI, tile, out_NO)
    return given_NO


def quantise_rows(x_NI: Tensor, *, is_grouped: bool) -> Fp8Rows:
    """``x`` in FP8, with a scale for each 128 elements or for each row; a row of zeros has scale 0."""
    rows: Fp8Rows = _quantise_rows(x_NI)(x_NI, is_grouped=is_grouped)
    return rows


def rmsnorm_quantise(x_NI: Tensor, norm: RowNorm, *, is_grouped: bool) -> tuple[Fp8Rows, Tensor]:
    """``rms_norm(x + residual)`` in FP8, and ``x + residual``; the norm's residual has as many rows as ``x``."""
    rows, sum_NI = _rmsnorm_quantise(x_NI)(x_NI, norm, is_grouped=is_grouped)
    return rows, sum_NI


def add_rms_norm_quantise(x_NI: Tensor, norm: RowNorm, *, is_grouped: bool) -> tuple[Tensor, Fp8Rows, Tensor]:
    """``rms_norm(x + residual)`` in the dtype of ``x``, that in FP8, and ``x + residual``."""
    normed_NI, rows, sum_NI = _add_rms_norm_quantise(x_NI)(x_NI, norm, is_grouped=is_grouped)
    return normed_NI, rows, sum_NI


def silu_mul_quantise(gate_up_N2I: Tensor, *, is_grouped: bool) -> Fp8Rows:
    """``silu(gate) * up`` of the two halves of the last dimension, in FP8."""
    rows: Fp8Rows = _silu_mul_quantise(gate_up_N2I)(gate_up_N2I, is_grouped=is_grouped)
    return rows


def fp8_gemm(rows: Fp8Rows, weight: Fp8Weight, tile: Tile | Fp8GemmTile, out_NO: Tensor) -> Tensor:
    """``x @ weight^T``, written to ``out_NO``; rows are grouped if the weights have blocks."""
    given_NO: Tensor = _fp8_gemm(out_NO, not isinstance(tile, Tile))(rows, weight, tile, out_NO)
    return given_NO


def fp8_gate_up_silu(rows: Fp8Rows, gate_up: Fp8Weight, tile: Fp8WgmmaTile, out_NO: Tensor) -> Tensor:
    """``silu(gate) * up`` of the two halves of ``fp8_gemm``'s output, ``[N, O / 2]``, rounded once.

    ``tile`` is one that ``gate_tiles_of`` gives for so many rows.
    """
    given_NO: Tensor = _fp8_gate_up_silu(out_NO, True)(rows, gate_up, tile, out_NO)
    return given_NO


def int4_gemm(x_NI: Tensor, weight: Int4Weight, tile: Int4Tile, out_NO: Tensor) -> Tensor:
    """``x @ weight^T``, written to ``out_NO``, whose rows may lie apart; ``x`` has the weight's order of inputs."""
    given_NO: Tensor = _int4_gemm(out_NO, not isinstance(tile, Tile))(x_NI, weight, tile, out_NO)
    return given_NO


def int4_dequantise(weight: Int4Weight, rows: range, out_OI: Tensor) -> Tensor:
    """Some outputs of the matrix, from a multiple of 64 on, rounded once to the dtype of ``out_OI``.

    Inputs are in the weight's order.
    """
    given_OI: Tensor = _int4_dequantise(out_OI)(weight, rows, out_OI)
    return given_OI
