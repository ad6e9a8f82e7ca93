"""The self-check of 4-bit GEMMs: the first matrix and the first experts of each form, beside their de-quantised values.

Shapes: N rows, I inputs, O outputs; of experts H the hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from plait_kernels.linear import Int4Matrix, Int4Weight
from plait_kernels.moe import Int4Experts

from plait_worker.weights.formats.gemm_check import OUTPUTS, check_once, error, experts_error, random_rows

_ROWS = (1, 16, 64, 512)
"""Each kind of GEMM: skinny ones, and wide ones."""
_MANY_ROWS = 2176
"""For which a matrix is de-quantised before, whatever tiles it has."""


def check_int4(weight: Int4Weight) -> None:
    """Once for each form of codes. Raises ``WorkerError`` if a GEMM is wrong on this GPU."""
    _check_once(weight, "a matrix", (*_ROWS, _MANY_ROWS), lambda num_rows: _matrix_error(weight, num_rows))


def check_int4_experts(experts: Int4Experts) -> None:
    """The same for a layer's experts."""
    _check_once(experts.down_EHI, "experts", _ROWS, lambda num_rows: _experts_error(experts, num_rows))


def _check_once(weight: Int4Weight, what: str, rows: Sequence[int], error_of: Callable[[int], float]) -> None:
    form = weight.kind, weight.group_size, weight.zero is not None, weight.order_I is not None, what
    gemms = f"{what} of {weight.kind} weights in groups of {weight.group_size}"
    check_once(form, gemms, rows, error_of, "--dtype bfloat16")


def _matrix_error(weight: Int4Weight, num_rows: int) -> float:
    """Of the whole matrix's kernels, which its shape chooses."""
    compared = weight.rows(range(min(OUTPUTS, weight.shape[0])))
    assert compared is not None
    x_NI = random_rows(num_rows, weight.num_inputs, weight.codes.device)
    given_NO = Int4Matrix([weight], None)(x_NI)
    return error(given_NO[:, : compared.shape[0]], x_NI.float() @ compared.dequantised().T)


def _experts_error(experts: Int4Experts, num_rows: int) -> float:
    """Of the first expert and the last."""
    gate_up, down = experts.gate_up_EJH, experts.down_EHI
    x_NH = random_rows(num_rows, gate_up.num_inputs, down.codes.device)
    chosen = ((one, gate_up.one(one).dequantised(), down.one(one).dequantised()) for one in (0, len(down.codes) - 1))
    return experts_error(experts, x_NH, chosen)
