"""The self-check of FP8 GEMMs: the first matrix and the first experts of each form, beside their de-quantised values.

So are a matrix whose size has other tiles, the gates of a dense MLP, and the norm that quantises for experts.

Shapes: N rows, I inputs, O outputs; of experts H the hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from plait_kernels.linear import Fp8Matrix, Fp8Weight, RowNorm, Tile, add_rms_norm_quantise, fp8_reference
from plait_kernels.linear.fp8 import MAX_FAST_INPUTS, quantise_rows
from plait_kernels.linear.fp8_matrix import takes_scaled_mm
from plait_kernels.linear.fp8_tiles import (
    Fp8CudaTile,
    Fp8GemmTile,
    Fp8RowTile,
    can_gate,
    gate_tiles_of,
    row_tile_of,
    tiles_of,
)
from plait_kernels.moe import Fp8Experts
from plait_kernels.moe.fp8_experts import has_few_rows
from plait_kernels.moe.parts import MAX_INDEXED
from plait_kernels.norm import reference as norms
from torch import Tensor

from plait_worker.weights.formats.gemm_check import MAX_ERROR, OUTPUTS, check_once, error, experts_error, random_rows

_ROWS = (1, 8, 16, 32, 64, 65, 129, 512)
"""Each kind of GEMM: of one row that is not rounded, of each tile, and torch's, which pads what is no whole fours."""
_MANY_ROWS = 512
"""Of few experts; each then has many."""
_MAX_EXPERTS_ERROR = 1 / 8
"""From one FP8 number to the next: by its last bit a value between gate and down may become either."""


def check_fp8(weight: Fp8Weight) -> None:
    """Once for each size of blocks, each tile, and inputs few enough for fast sums or not.

    Raises ``WorkerError`` if a GEMM is wrong on this GPU.
    """
    is_short = not weight.block_rows and weight.shape[1] <= MAX_FAST_INPUTS
    for num_rows, chosen in _chosen_by(weight).items():
        part = num_rows, chosen, is_short
        _check_once(weight, "a matrix", [num_rows], lambda rows: _matrix_error(weight, rows), part=part)


def check_fp8_gates(matrix: Fp8Matrix) -> None:
    """The same for the rows of which the matrix applies gates, by themselves and behind a norm."""
    weight = matrix.weight_OI
    gated_by = _gated_by(weight)
    for num_rows in filter(matrix.gates, _ROWS):
        part = num_rows, gated_by[num_rows]
        _check_once(weight, "gates", [num_rows], lambda rows: _gates_error(matrix, rows), part=part)


def _chosen_by(weight: Fp8Weight) -> dict[int, Fp8RowTile | Fp8GemmTile | Tile | bool | None]:
    """For each number of rows the same for matrices with the same kernel: a tile, or whether torch's takes this one."""
    tiles, takes = tiles_of(weight), takes_scaled_mm(weight)
    return {num_rows: row_tile_of(weight) if num_rows == 1 else tiles.get(num_rows, takes) for num_rows in _ROWS}


def _gated_by(weight: Fp8Weight) -> dict[int, Fp8CudaTile | None]:
    """The same with gates, whose tile need not be that of as many rows without."""
    tiles, of_row = gate_tiles_of(weight), row_tile_of(weight)
    one = of_row if of_row and can_gate(weight, of_row) else None
    return {num_rows: one if num_rows == 1 else tiles.get(num_rows) for num_rows in _ROWS}


def check_fp8_experts(experts: Fp8Experts) -> None:
    """The same for a layer's experts, and for the norm that quantises for them."""
    rows = _expert_rows(len(experts.down_EHI.stored_OI))
    _check_once(experts.down_EHI, "experts", rows, lambda rows: _experts_error(experts, rows), _MAX_EXPERTS_ERROR)
    gate_up, quantised = experts.gate_up_EJH.one(0), [each for each in rows if experts.takes_rows(each)]
    norm = "the norm before experts"
    _check_once(gate_up, norm, quantised, lambda rows: _norm_error(gate_up, rows), _MAX_EXPERTS_ERROR)


def _expert_rows(num_experts: int) -> list[int]:
    """One row's pairs by themselves, groups of few rows with the tile of fewer and of more, and of many rows.

    Every row takes two experts.
    """
    many = _MANY_ROWS
    while has_few_rows(2 * many / num_experts):
        many *= 2
    more = many // 2
    while not has_few_rows(2 * more / num_experts):
        more //= 2
    return [1, MAX_INDEXED + 1, more, many]


def _check_once(
    weight: Fp8Weight,
    what: str,
    rows: Sequence[int],
    error_of: Callable[[int], float],
    max_error: float = MAX_ERROR,
    part: tuple[object, ...] = (),
) -> None:
    scales = f"blocks of {weight.block_rows} outputs" if weight.block_rows else "a scale an output"
    gemms = f"{what} of FP8 weights with {scales}"
    advice = "--dtype bfloat16, not --quantization fp8"
    check_once(("fp8", weight.block_rows, what, *part), gemms, rows, error_of, advice, max_error)


def _matrix_error(weight: Fp8Weight, num_rows: int) -> float:
    """Of the whole matrix's kernels, which its shape chooses."""
    compared = weight.rows(range(min(OUTPUTS, weight.shape[0])))
    x_NI = random_rows(num_rows, weight.shape[1], weight.stored_OI.device)
    given_NO = Fp8Matrix(weight, None)(x_NI)
    rows_NI = x_NI.float() if num_rows == 1 else _rounded(x_NI, weight)
    return error(given_NO[:, : compared.shape[0]], rows_NI @ compared.dequantised().T)


def _gates_error(matrix: Fp8Matrix, num_rows: int) -> float:
    """Of the first gates."""
    weight = matrix.weight_OI
    x_NI = random_rows(num_rows, weight.shape[1], weight.stored_OI.device)
    norm = _norm_of(x_NI)
    sum_NI = norm.residual_1I + x_NI
    normed_NI = norms.rms_norm(sum_NI.float(), norm.weight_I.float(), norm.eps)
    given_NO, given_sum_NI = matrix.rmsnorm_gate_up(x_NI, norm)
    return _worst(
        _first_gates_error(matrix.gate_up(x_NI), x_NI.float(), weight),
        _first_gates_error(given_NO, normed_NI, weight),
        error(given_sum_NI, sum_NI.float()),
    )


def _first_gates_error(given_NO: Tensor, x_NI: Tensor, weight: Fp8Weight) -> float:
    half = weight.shape[0] // 2
    compared = min(OUTPUTS, half)
    rows_NI = x_NI if len(x_NI) == 1 else _rounded(x_NI, weight)
    gate_NO, up_NO = (rows_NI @ weight.rows(range(first, first + compared)).dequantised().T for first in (0, half))
    return error(given_NO[:, :compared], F.silu(gate_NO) * up_NO)


def _norm_error(weight: Fp8Weight, num_rows: int) -> float:
    """Of what ``add_rms_norm_quantise`` gives for the matrix."""
    x_NI = random_rows(num_rows, weight.shape[1], weight.stored_OI.device)
    norm, is_grouped = _norm_of(x_NI), weight.block_rows > 0
    given_NI, given, given_sum_NI = add_rms_norm_quantise(x_NI, norm, is_grouped=is_grouped)
    right_NI, right, right_sum_NI = fp8_reference.add_rms_norm_quantise(x_NI, norm, is_grouped=is_grouped)
    return _worst(
        error(given.dequantised(), right.dequantised()),
        error(given_NI, right_NI.float()),
        error(given_sum_NI, right_sum_NI.float()),
    )


def _norm_of(x_NI: Tensor) -> RowNorm:
    return RowNorm(x_NI.flip(1), x_NI[0].abs(), 1e-6)


def _worst(*errors: float) -> float:
    """NaN if one is."""
    return float(torch.tensor(errors).max())


def _experts_error(experts: Fp8Experts, num_rows: int) -> float:
    """Of the first expert and the last."""
    gate_up, down = experts.gate_up_EJH, experts.down_EHI
    device, last = down.stored_OI.device, len(down.stored_OI) - 1
    x_NH = random_rows(num_rows, gate_up.stored_OI.shape[2], device)
    chosen = ((one, gate_up.one(one).dequantised(), down.one(one).dequantised()) for one in (0, last))
    if num_rows <= MAX_INDEXED and device.type == "cuda":
        return experts_error(experts, x_NH, chosen)
    return experts_error(experts, x_NH, chosen, lambda value_NI: _rounded(value_NI, gate_up))


def _rounded(x_NI: Tensor, weight: Fp8Weight) -> Tensor:
    """The rows as the GEMM takes them."""
    return quantise_rows(x_NI.float(), is_grouped=weight.block_rows > 0).dequantised()
