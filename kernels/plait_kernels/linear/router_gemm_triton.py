"""A router's GEMM of a few rows in Triton, with float32 outputs: short sums side by side instead of long ones.

A program computes 16 outputs of 8 rows. Each of its warps sums over its own slice of the inputs, and then the warps'
sums are added, in a fixed order; a warp that summed over all inputs would wait after each step for the one before. Its
weights are read before it waits for the previous kernel (PDL), so that what follows is one read of the rows.

Shapes: N rows, I inputs, O outputs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from plait_kernels.pdl import pdl_launch, pdl_wait

_OUTPUTS, _ROWS, _SLICES = 16, 8, 8


def router_gemm(x_NI: Tensor, weight_OI: Tensor) -> Tensor:
    """See ``plait_kernels.linear.router_gemm``; a program holds all inputs of its outputs and rows."""
    x_NI = x_NI.contiguous()
    (num_rows, num_inputs), num_outputs = x_NI.shape, weight_OI.shape[0]
    logits_NO = torch.empty(num_rows, num_outputs, dtype=torch.float32, device=x_NI.device)
    if num_rows:
        _router_gemm_kernel[(triton.cdiv(num_outputs, _OUTPUTS), triton.cdiv(num_rows, _ROWS))](
            x_NI,
            weight_OI,
            logits_NO,
            num_rows,
            NUM_OUTPUTS=num_outputs,
            NUM_INPUTS=num_inputs,
            ROWS=_ROWS,
            OUTPUTS=_OUTPUTS,
            SLICES=_SLICES,
            INPUTS=max(16, triton.next_power_of_2(triton.cdiv(num_inputs, _SLICES))),
            num_warps=_SLICES,
            **pdl_launch(x_NI),
        )
    return logits_NO


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def _router_gemm_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    weight_ptr,
    logits_ptr,
    num_rows,
    NUM_OUTPUTS: tl.constexpr,
    NUM_INPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    SLICES: tl.constexpr,
    INPUTS: tl.constexpr,
    PDL: tl.constexpr,
):
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, SLICES)[:, None] * INPUTS + tl.arange(0, INPUTS)[None, :]
    # What is beyond is read as the last of its kind and not stored: fewer masks, and all reads are under way at once.
    own_output, own_row = tl.minimum(output, NUM_OUTPUTS - 1), tl.minimum(row, num_rows - 1)
    weight_at = weight_ptr + own_output[None, :, None] * NUM_INPUTS + column[:, None, :]
    x_at = x_ptr + own_row[None, :, None] * NUM_INPUTS + column[:, None, :]
    if NUM_INPUTS == SLICES * INPUTS:
        weight = tl.load(weight_at)
        pdl_wait(PDL)
        x = tl.load(x_at)
    else:
        is_input = (column < NUM_INPUTS)[:, None, :]
        weight = tl.load(weight_at, mask=is_input, other=0.0)
        pdl_wait(PDL)
        x = tl.load(x_at, mask=is_input, other=0.0)
    logits = tl.sum(tl.dot(weight, tl.permute(x, (0, 2, 1))), axis=0)
    logits_at = logits_ptr + row[None, :] * NUM_OUTPUTS + output[:, None]
    tl.store(logits_at, logits, mask=(output < NUM_OUTPUTS)[:, None] & (row < num_rows)[None, :])
