"""A matrix whose weights stay FP8 on a GPU. Shapes: N rows, I inputs, O outputs."""

from __future__ import annotations

import torch
from torch import Tensor

from plait_kernels.activation import silu_mul
from plait_kernels.linear.fp8 import GROUP, MAX_FAST_INPUTS, MULTIPLE, ROWS_MULTIPLE, Fp8Rows, Fp8Weight
from plait_kernels.linear.fp8_gemm_cuda import compile_for, compile_gates
from plait_kernels.linear.fp8_tiles import Fp8WgmmaTile, can_gate, gate_tiles_of, row_tile_of, tiles_of
from plait_kernels.linear.gemm import (
    fp8_gate_up_silu,
    fp8_gemm,
    gate_up_silu,
    gemv,
    quantise_rows,
    rmsnorm_gate_up_silu,
    rmsnorm_quantise,
    silu_mul_quantise,
)
from plait_kernels.linear.gemm_tuning import FP8_TILE
from plait_kernels.linear.matrix import Matrix
from plait_kernels.linear.reference import RowNorm

CAPABILITY = 9
"""Of Hopper GPUs, for which the kernels were tried."""


def fp8_unsupported_reason(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why GEMMs with FP8 weights and activations of ``dtype`` do not run on a device; None if they do."""
    if dtype != torch.bfloat16:
        return f"they are multiplied with bfloat16 rows, not {str(dtype).removeprefix('torch.')}"
    if device.type != "cuda":
        return "they are multiplied on a GPU"
    capability = torch.cuda.get_device_capability(device)
    if capability[0] != CAPABILITY:
        return f"the GPU has compute capability {capability[0]}.{capability[1]}, and their kernels are for 9.0"
    return None


class Fp8Matrix:
    """One row goes as it is through a GEMV; more are quantised, for our GEMMs of a few and cuBLASLt's of many."""

    def __init__(self, weight: Fp8Weight, bias_O: Tensor | None) -> None:
        """``weight`` of multiples of ``MULTIPLE`` on the GPU; rows are bfloat16."""
        self.weight_OI, self.bias_O = weight, bias_O
        self.is_grouped = weight.block_rows > 0
        compile_for(weight, (row_tile_of(weight), *tiles_of(weight).values()))
        # Read after that: kernels that do not compile are no tiles any more.
        self._tiles = tiles_of(weight)
        self.row_tile = row_tile_of(weight)
        """Of ``gemv`` and ``rmsnorm_gemv``."""
        self._row_gate_tile = self.row_tile if self.row_tile and can_gate(weight, self.row_tile) else None
        self._gate_tiles: dict[int, Fp8WgmmaTile] = {}
        self._is_short = not self.is_grouped and weight.shape[1] <= MAX_FAST_INPUTS
        self._takes_scaled_mm = weight.stored_OI.is_cuda and takes_scaled_mm(weight)

    def __call__(self, x_NI: Tensor) -> Tensor:
        """See ``Matrix``."""
        return self._with_bias(self.matmul_out(x_NI, self._empty(x_NI)))

    def matmul_out(self, x_NI: Tensor, out_NO: Tensor) -> Tensor:
        """``x @ weight^T`` without bias, written to ``out_NO``."""
        if x_NI.shape[0] == 1:
            return gemv(x_NI, self.weight_OI, out_NO, self.row_tile)
        return self._matmul(quantise_rows(x_NI, is_grouped=self.is_grouped), out_NO)

    def matmul_float32(self, x_NI: Tensor) -> Tensor:
        """See ``Matrix``; rounded to bfloat16 before."""
        return self(x_NI).float()

    def rmsnorm_matmul(self, x_NI: Tensor, norm: RowNorm) -> tuple[Tensor, Tensor]:
        """The same for ``rms_norm(x + residual)`` of two rows or more, and that sum."""
        rows, sum_NI = rmsnorm_quantise(x_NI, norm, is_grouped=self.is_grouped)
        return self._with_bias(self._matmul(rows, self._empty(x_NI))), sum_NI

    def silu_mul_matmul(self, gate_up_N2I: Tensor) -> Tensor:
        """The same for ``silu(gate) * up`` of two rows or more."""
        rows = silu_mul_quantise(gate_up_N2I, is_grouped=self.is_grouped)
        return self._with_bias(self._matmul(rows, self._empty(gate_up_N2I)))

    def compile_gates(self) -> None:
        """Let ``gates`` be true of more than one row: for a matrix of gates and what they gate, without bias."""
        compile_gates(self.weight_OI, gate_tiles_of(self.weight_OI).values())
        self._gate_tiles = gate_tiles_of(self.weight_OI)

    def gates(self, num_rows: int) -> bool:
        """Whether ``gate_up`` and ``rmsnorm_gate_up`` take so many rows."""
        return num_rows == 1 or num_rows in self._gate_tiles

    def gate_up(self, x_NI: Tensor) -> Tensor:
        """``silu(gate) * up`` of the two halves of ``x @ weight^T``, ``[N, O / 2]``; not rounded before."""
        if x_NI.shape[0] == 1:
            return gate_up_silu(x_NI, self.weight_OI, self._row_gate_tile)
        return self._gate_up(quantise_rows(x_NI, is_grouped=self.is_grouped), x_NI)

    def rmsnorm_gate_up(self, x_NI: Tensor, norm: RowNorm) -> tuple[Tensor, Tensor]:
        """The same for ``rms_norm(x + residual)``, and that sum."""
        if x_NI.shape[0] == 1:
            return rmsnorm_gate_up_silu(x_NI, norm, self.weight_OI, self._row_gate_tile)
        rows, sum_NI = rmsnorm_quantise(x_NI, norm, is_grouped=self.is_grouped)
        return self._gate_up(rows, x_NI), sum_NI

    def _gate_up(self, rows: Fp8Rows, x_NI: Tensor) -> Tensor:
        num_rows = x_NI.shape[0]
        out_NO = x_NI.new_empty(num_rows, self.weight_OI.shape[0] // 2)
        return fp8_gate_up_silu(rows, self.weight_OI, self._gate_tiles[num_rows], out_NO)

    def _matmul(self, rows: Fp8Rows, out_NO: Tensor) -> Tensor:
        num_rows = rows.stored_NI.shape[0]
        tile = self._tiles.get(num_rows)
        if tile is None and not (self._takes_scaled_mm and num_rows):
            tile = FP8_TILE
        if tile is not None:
            return fp8_gemm(rows, self.weight_OI, tile, out_NO)
        return scaled_mm(rows, self.weight_OI, out_NO, use_fast_accum=self._is_short)

    def _empty(self, x_NI: Tensor) -> Tensor:
        return x_NI.new_empty(x_NI.shape[0], self.weight_OI.shape[0])

    def _with_bias(self, out_NO: Tensor) -> Tensor:
        return out_NO if self.bias_O is None else out_NO + self.bias_O


def silu_mul_matmul(gate_up_N2I: Tensor, matrix: Matrix) -> Tensor:
    """The GEMM of ``silu(gate) * up`` of the two halves of the last dimension, ``[N, O]``."""
    if isinstance(matrix, Fp8Matrix) and gate_up_N2I.shape[0] > 1:
        return matrix.silu_mul_matmul(gate_up_N2I)
    return matrix(silu_mul(gate_up_N2I))


def can_multiply(weight: Fp8Weight) -> bool:
    """Whether the kernels take a matrix of this shape."""
    return all(size % MULTIPLE == 0 and size > 0 for size in weight.shape)


def takes_scaled_mm(weight: Fp8Weight) -> bool:
    """cuBLASLt wants whole blocks of 128, and rows of scales that begin at 16 bytes."""
    num_outputs, num_inputs = weight.shape
    if not weight.block_rows:
        return True
    return weight.block_rows == GROUP and num_outputs % GROUP == 0 and num_inputs % (4 * GROUP) == 0


def scaled_mm(rows: Fp8Rows, weight: Fp8Weight, out_NO: Tensor, *, use_fast_accum: bool) -> Tensor:
    """torch's GEMM, written to ``out_NO``; fast sums have about 14 bits and do not exist for blocks."""
    scale, num_rows = weight.scale.t() if weight.block_rows else weight.scale[None], len(out_NO)
    if weight.block_rows and num_rows % ROWS_MULTIPLE:
        rows = rows.in_fours()
        padded_NO = out_NO.new_empty(len(rows.stored_NI), out_NO.shape[1])
        return out_NO.copy_(scaled_mm(rows, weight, padded_NO, use_fast_accum=use_fast_accum)[:num_rows])
    return torch._scaled_mm(
        rows.stored_NI,
        weight.stored_OI.t(),
        rows.scale,
        scale,
        out_dtype=out_NO.dtype,
        use_fast_accum=use_fast_accum,
        out=out_NO,
    )
