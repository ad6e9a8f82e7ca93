"""The self-check of 4-bit GEMMs: the first matrix and the first experts of each form, beside their de-quantised values.

Shapes: N rows, I inputs, O outputs; of experts H the hidden size, K a row's experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from plait_kernels.linear import Int4Matrix, Int4Weight
from plait_kernels.moe import Int4Experts
from plait_proto import ExitCode

from plait_worker.errors import WorkerError

_ROWS = (1, 16, 64, 512)
"""Each kind of GEMM: skinny ones, and wide ones."""
_MANY_ROWS = 2176
"""For which a matrix is de-quantised before, whatever tiles it has."""
_OUTPUTS = 256
"""Of the matrix that are compared."""
_MAX_ERROR = 0.03
"""Over the largest output: several times what rounding to bfloat16 gives."""

_Form = tuple[str, int, bool, bool, str]
_checked: set[_Form] = set()


def check_int4(weight: Int4Weight) -> None:
    """Once for each form of codes. Raises ``WorkerError`` if a GEMM is wrong on this GPU."""
    _check_once(weight, "a matrix", (*_ROWS, _MANY_ROWS), lambda num_rows: _matrix_error(weight, num_rows))


def check_int4_experts(experts: Int4Experts) -> None:
    """The same for a layer's experts."""
    _check_once(experts.down_EHI, "experts", _ROWS, lambda num_rows: _experts_error(experts, num_rows))


def _check_once(weight: Int4Weight, what: str, rows: Sequence[int], error_of: Callable[[int], float]) -> None:
    form = weight.kind, weight.group_size, weight.zero is not None, weight.order_I is not None, what
    if form in _checked:
        return
    _checked.add(form)
    for num_rows in rows:
        if not (error := error_of(num_rows)) <= _MAX_ERROR:
            raise WorkerError(
                ExitCode.HARDWARE,
                f"GEMMs of {what} of {weight.kind} weights in groups of {weight.group_size} are wrong on this GPU: "
                f"{num_rows} rows are off by {error:.2g} of the largest output; serve the model with "
                "--dtype bfloat16, and report this",
            )


def _matrix_error(weight: Int4Weight, num_rows: int) -> float:
    """Of the whole matrix's kernels, which its shape chooses."""
    compared = weight.rows(range(min(_OUTPUTS, weight.shape[0])))
    assert compared is not None
    x_NI = _drawn(num_rows, weight.num_inputs, weight.codes.device)
    given_NO = Int4Matrix([weight], None)(x_NI)
    return _error(given_NO[:, : compared.shape[0]], x_NI.float() @ compared.dequantised().T)


def _experts_error(experts: Int4Experts, num_rows: int) -> float:
    """Of the first expert and the last, which weigh alike."""
    both = 0, len(experts.down_EHI.codes) - 1
    x_NH = _drawn(num_rows, experts.gate_up_EJH.num_inputs, experts.down_EHI.codes.device)
    ids_NK = torch.tensor(both, device=x_NH.device).repeat(num_rows, 1)
    right_NH = torch.zeros_like(x_NH, dtype=torch.float32)
    for expert in both:
        gate_NI, up_NI = (x_NH.float() @ experts.gate_up_EJH.one(expert).dequantised().T).chunk(2, dim=1)
        right_NH += F.silu(gate_NI) * up_NI @ experts.down_EHI.one(expert).dequantised().T
    return _error(experts(x_NH, torch.ones_like(ids_NK, dtype=torch.float32), ids_NK), right_NH)


def _drawn(num_rows: int, num_inputs: int, device: torch.device) -> torch.Tensor:
    drawn = torch.Generator(device).manual_seed(num_rows)
    return torch.randn(num_rows, num_inputs, generator=drawn, device=device).bfloat16()


def _error(given: torch.Tensor, right: torch.Tensor) -> float:
    """Largest difference over the largest output; NaN if an output is."""
    return float((given.float() - right).abs().max() / right.abs().max())
