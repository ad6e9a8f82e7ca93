"""The self-check of FP8 GEMMs: the first matrix and the first experts of each form, beside their de-quantised values.

Shapes: N rows, I inputs, O outputs; of experts H the hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from plait_kernels.linear import Fp8Matrix, Fp8Weight
from plait_kernels.linear.fp8 import quantise_rows
from plait_kernels.moe import Fp8Experts
from plait_kernels.moe.parts import MAX_INDEXED
from torch import Tensor

from plait_worker.weights.formats.gemm_check import MAX_ERROR, OUTPUTS, check_once, error, experts_error, random_rows

_ROWS = (1, 8, 16, 32, 64, 65, 129, 512)
"""Each kind of GEMM: of one row that is not rounded, of each tile, and torch's, which pads what is no whole fours."""
_EXPERT_ROWS = (1, 16, 64, 512)
"""One row's pairs by themselves, and groups of few rows and of many."""
_MAX_EXPERTS_ERROR = 1 / 8
"""From one FP8 number to the next: by its last bit a value between gate and down may become either."""


def check_fp8(weight: Fp8Weight) -> None:
    """Once for each size of blocks. Raises ``WorkerError`` if a GEMM is wrong on this GPU."""
    _check_once(weight, "a matrix", _ROWS, lambda num_rows: _matrix_error(weight, num_rows), MAX_ERROR)


def check_fp8_experts(experts: Fp8Experts) -> None:
    """The same for a layer's experts."""
    _check_once(
        experts.down_EHI,
        "experts",
        _EXPERT_ROWS,
        lambda num_rows: _experts_error(experts, num_rows),
        _MAX_EXPERTS_ERROR,
    )


def _check_once(
    weight: Fp8Weight, what: str, rows: Sequence[int], error_of: Callable[[int], float], max_error: float
) -> None:
    scales = f"blocks of {weight.block_rows} outputs" if weight.block_rows else "a scale an output"
    gemms = f"{what} of FP8 weights with {scales}"
    advice = "--dtype bfloat16, not --quantization fp8"
    check_once(("fp8", weight.block_rows, what), gemms, rows, error_of, advice, max_error)


def _matrix_error(weight: Fp8Weight, num_rows: int) -> float:
    """Of the whole matrix's kernels, which its shape chooses."""
    compared = weight.rows(range(min(OUTPUTS, weight.shape[0])))
    x_NI = random_rows(num_rows, weight.shape[1], weight.stored_OI.device)
    given_NO = Fp8Matrix(weight, None)(x_NI)
    rows_NI = x_NI.float() if num_rows == 1 else _rounded(x_NI, weight)
    return error(given_NO[:, : compared.shape[0]], rows_NI @ compared.dequantised().T)


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
