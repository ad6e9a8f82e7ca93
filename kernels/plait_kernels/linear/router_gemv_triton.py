"""A router's GEMV for one row in Triton, with or without the norm before it: a program computes one output.

Each program computes the norm itself, from the L2 cache, which saves a kernel; the first one stores it for later
kernels. Behind a sum over several ranks the norm comes with the sum. A program loads its weights before it waits for
the previous kernel (PDL).

Shapes: I inputs, O outputs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from plait_kernels.linear.reference import RowNorm
from plait_kernels.pdl import pdl_launch, pdl_wait


def rmsnorm_router_gemv(x_1I: Tensor, norm: RowNorm, weight_OI: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """See ``plait_kernels.linear.rmsnorm_router_gemv``; all contiguous, the sum is rounded before it is normalised."""
    normed_1I, sum_1I = torch.empty_like(x_1I), torch.empty_like(x_1I)
    return _launch(x_1I, norm, weight_OI, normed_1I, sum_1I), normed_1I, sum_1I


def router_gemv(x_1I: Tensor, weight_OI: Tensor) -> Tensor:
    """See ``plait_kernels.linear.router_gemv``; both contiguous."""
    return _launch(x_1I, None, weight_OI, x_1I, x_1I)


def _launch(x_1I: Tensor, norm: RowNorm | None, weight_OI: Tensor, normed_1I: Tensor, sum_1I: Tensor) -> Tensor:
    num_outputs, num_inputs = weight_OI.shape
    logits_1O = torch.empty(1, num_outputs, dtype=torch.float32, device=x_1I.device)
    block = triton.next_power_of_2(num_inputs)
    _router_gemv_kernel[(num_outputs,)](
        x_1I,
        norm.residual_1I if norm else x_1I,
        norm.weight_I if norm else x_1I,
        weight_OI,
        logits_1O,
        normed_1I,
        sum_1I,
        norm.eps if norm else 0.0,
        NUM_INPUTS=num_inputs,
        BLOCK=block,
        HAS_NORM=norm is not None,
        num_warps=min(8, max(1, block // 512)),
        **pdl_launch(x_1I),
    )
    return logits_1O


@triton.jit
def _router_gemv_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    residual_ptr,
    norm_ptr,
    weight_ptr,
    logits_ptr,
    normed_ptr,
    sum_ptr,
    eps,
    NUM_INPUTS: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    output, column = tl.program_id(0), tl.arange(0, BLOCK)
    is_there = column < NUM_INPUTS
    weight = tl.load(weight_ptr + output.to(tl.int64) * NUM_INPUTS + column, mask=is_there, other=0.0).to(tl.float32)
    factor = tl.load(norm_ptr + column, mask=is_there, other=0.0).to(tl.float32) if HAS_NORM else weight
    pdl_wait(PDL)
    normed = tl.load(x_ptr + column, mask=is_there, other=0.0)
    if HAS_NORM:
        residual = tl.load(residual_ptr + column, mask=is_there, other=0.0)
        total = (normed.to(tl.float32) + residual.to(tl.float32)).to(normed.dtype)
        wide = total.to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / NUM_INPUTS + eps)
        normed = (wide * scale * factor).to(normed.dtype)
        if output == 0:
            tl.store(sum_ptr + column, total, mask=is_there)
            tl.store(normed_ptr + column, normed, mask=is_there)
    tl.store(logits_ptr + output, tl.sum(normed.to(tl.float32) * weight, axis=0))
