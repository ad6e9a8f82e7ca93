"""The self-check of 4-bit GEMMs: the first matrix of each form is compared with its de-quantised values.

Shapes: N rows, I inputs, O outputs.
"""

from __future__ import annotations

import torch
from plait_kernels.linear import Int4Matrix, Int4Weight
from plait_proto import ExitCode

from plait_worker.errors import WorkerError

_ROWS = (1, 16, 64, 512)
"""Each kind of GEMM: skinny ones, and de-quantised before."""
_OUTPUTS = 256
"""Of the matrix that are compared."""
_MAX_ERROR = 0.03
"""Over the largest output: several times what rounding to bfloat16 gives."""

_Form = tuple[str, int, bool, bool]
_checked: set[_Form] = set()


def check_int4(weight: Int4Weight) -> None:
    """Once for each form of codes. Raises ``WorkerError`` if a GEMM is wrong on this GPU."""
    form = weight.kind, weight.group_size, weight.zero is not None, weight.order_I is not None
    if form not in _checked:
        _checked.add(form)
        for num_rows in _ROWS:
            if not (error := _error(weight, num_rows)) <= _MAX_ERROR:
                raise WorkerError(
                    ExitCode.HARDWARE,
                    f"GEMMs with {weight.kind} weights in groups of {weight.group_size} are wrong on this GPU: "
                    f"{num_rows} rows are off by {error:.2g} of the largest output; serve the model with "
                    "--dtype bfloat16, and report this",
                )


def _error(weight: Int4Weight, num_rows: int) -> float:
    """Largest difference over the largest output; NaN if an output is."""
    device = weight.codes.device
    part = weight.rows(range(min(_OUTPUTS, weight.shape[0])))
    assert part is not None
    part = part.to(device)
    drawn = torch.Generator(device).manual_seed(num_rows)
    x_NI = torch.randn(num_rows, part.num_inputs, generator=drawn, device=device).bfloat16()
    right_NO = x_NI.float() @ part.dequantised().T
    given_NO = Int4Matrix([part], None)(x_NI).float()
    return float((given_NO - right_NO).abs().max() / right_NO.abs().max())
