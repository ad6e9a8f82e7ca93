"""A matrix times one row in Triton: a program takes a few outputs and reads their weights once, in order.

cuBLAS pads the row to a tile and, for tall matrices, adds partial sums in a second kernel; on an H200 that takes 1.04
(24576 x 4096) to 1.18 (4096 x 4096) times as long.

Shapes: I inputs, O outputs.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_OUTPUTS = 4
_INPUTS = 1024


def multiply_row(x_1I: Tensor, weight_OI: Tensor) -> Tensor:
    """See ``plait_kernels.linear.multiply_row``; both contiguous."""
    num_outputs, num_inputs = weight_OI.shape
    out_1O = x_1I.new_empty(1, num_outputs)
    _multiply_row[(triton.cdiv(num_outputs, _OUTPUTS),)](
        x_1I,
        weight_OI,
        out_1O,
        num_outputs,
        num_inputs,
        IS_EVEN=num_outputs % _OUTPUTS == 0 and num_inputs % _INPUTS == 0,
        OUTPUTS=_OUTPUTS,
        INPUTS=_INPUTS,
        num_warps=4,
    )
    return out_1O


@triton.jit
def _multiply_row(  # type: ignore[no-untyped-def]
    x_ptr,
    weight_ptr,
    out_ptr,
    num_outputs,
    num_inputs,
    IS_EVEN: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    place = tl.arange(0, INPUTS)
    row = weight_ptr + output.to(tl.int64)[:, None] * num_inputs
    sums = tl.zeros([OUTPUTS, INPUTS], tl.float32)
    for begin in range(0, num_inputs, INPUTS):
        if IS_EVEN:  # masks cost a tenth of the speed
            x = tl.load(x_ptr + begin + place)
            weight = tl.load(row + begin + place[None, :])
        else:
            is_input = begin + place < num_inputs
            is_there = (output < num_outputs)[:, None] & is_input[None, :]
            x = tl.load(x_ptr + begin + place, mask=is_input, other=0.0)
            weight = tl.load(row + begin + place[None, :], mask=is_there, other=0.0)
        sums += weight.to(tl.float32) * x.to(tl.float32)[None, :]
    out = tl.sum(sums, axis=1).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + output, out, mask=output < num_outputs)
