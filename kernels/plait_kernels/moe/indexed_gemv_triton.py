"""Experts of one or two tokens in Triton: each (token, expert) pair indexes its matrices, in two launches.

Pairs are the fastest dimension of the grid: those of one expert read the same rows of its matrices at the same time.

Shapes: T tokens, E experts, K experts a token, H the hidden size, I an expert's width, N = T K pairs of token and
expert.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from plait_kernels.linear.fp8 import GROUP, Fp8Weight
from plait_kernels.pdl import pdl_launch, pdl_wait


def expert_mlps(
    x_TH: Tensor,
    gate_up_EJH: Tensor | Fp8Weight,
    down_EHI: Tensor | Fp8Weight,
    weights_TK: Tensor,
    experts_TK: Tensor,
    is_partial: bool = False,
) -> Tensor:
    """See ``plait_kernels.moe.expert_mlps``; all contiguous. If ``is_partial``, an expert of -1 adds nothing."""
    num_tokens, top_k = experts_TK.shape
    gate_up, gate_up_scales = _stored(gate_up_EJH)
    down, down_scales = _stored(down_EHI)
    _, hidden_size, width = down.shape
    gate_up_tile, down_tile = _gate_up_tile(hidden_size), _down_tile(is_fp8=isinstance(down_EHI, Fp8Weight))
    gated_NI = x_TH.new_empty(num_tokens * top_k, width)
    out_TH = x_TH.new_empty(num_tokens, hidden_size)
    if num_tokens == 0:
        return out_TH
    _gate_up_kernel[(num_tokens * top_k, triton.cdiv(width, gate_up_tile["OUTPUTS"]))](
        x_TH,
        gate_up,
        gate_up_scales[0],
        experts_TK,
        gated_NI,
        HIDDEN=hidden_size,
        WIDTH=width,
        TOP_K=top_k,
        **_scaling(gate_up_scales),
        **gate_up_tile,
        **pdl_launch(x_TH),
    )
    _down_kernel[(num_tokens, triton.cdiv(hidden_size, down_tile["OUTPUTS"]))](
        gated_NI,
        down,
        down_scales[0],
        weights_TK,
        experts_TK,
        out_TH,
        HIDDEN=hidden_size,
        WIDTH=width,
        TOP_K=top_k,
        IS_PARTIAL=is_partial,
        **_scaling(down_scales),
        **down_tile,
        **pdl_launch(x_TH),
    )
    return out_TH


def _gate_up_tile(hidden_size: int) -> dict[str, int]:
    """The fastest of 25 on an H200 for DeepSeek-V2-Lite's shapes, in FP8 and bfloat16, where no inputs are masked."""
    return {"OUTPUTS": 2, "INPUTS": 2048 if hidden_size % 2048 == 0 else 512, "num_warps": 2}


def _down_tile(is_fp8: bool) -> dict[str, int]:
    """The same of 45."""
    return {"OUTPUTS": 1 if is_fp8 else 2, "INPUTS": 512, "num_warps": 2}


def _stored(weight: Tensor | Fp8Weight) -> tuple[Tensor, tuple[Tensor, int | None]]:
    """What is stored; its scales, and outputs of a block, 0 if each has a scale and None if there are no scales."""
    if isinstance(weight, Fp8Weight):
        return weight.stored_OI, (weight.scale, weight.block_rows)
    return weight, (weight, None)


def _scaling(scales: tuple[Tensor, int | None]) -> dict[str, int | bool]:
    return {"IS_SCALED": scales[1] == 0, "BLOCK_ROWS": scales[1] or 0, "GROUP": GROUP}


@triton.jit
def _gate_up_kernel(  # type: ignore[no-untyped-def]  # budget: one loop over the inputs
    x_ptr,
    weight_ptr,
    scale_ptr,
    experts_ptr,
    out_ptr,
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
    TOP_K: tl.constexpr,
    IS_SCALED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl_wait(PDL)
    pair = tl.program_id(0).to(tl.int64)
    output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    column = tl.arange(0, INPUTS)
    expert = tl.load(experts_ptr + pair)
    NUM_GROUPS: tl.constexpr = (HIDDEN + GROUP - 1) // GROUP
    if expert >= 0:
        gate_row = weight_ptr + (expert * 2 * WIDTH + output)[:, None] * HIDDEN
        up_row = gate_row + WIDTH * HIDDEN
        gate, up = tl.zeros([OUTPUTS, INPUTS], tl.float32), tl.zeros([OUTPUTS, INPUTS], tl.float32)
        for begin in range(0, HIDDEN, INPUTS):
            at = begin + column
            is_input = at < HIDDEN
            if HIDDEN % INPUTS == 0 and WIDTH % OUTPUTS == 0:  # masks cost a tenth of the speed
                x = tl.load(x_ptr + pair // TOP_K * HIDDEN + at).to(tl.float32)
                gate_weight, up_weight = tl.load(gate_row + at[None, :]), tl.load(up_row + at[None, :])
            else:
                is_there = (output < WIDTH)[:, None] & is_input[None, :]
                x = tl.load(x_ptr + pair // TOP_K * HIDDEN + at, mask=is_input, other=0.0).to(tl.float32)
                gate_weight = tl.load(gate_row + at[None, :], mask=is_there, other=0.0)
                up_weight = tl.load(up_row + at[None, :], mask=is_there, other=0.0)
            gate_x, up_x = x, x
            if BLOCK_ROWS > 0:  # a program's outputs lie in one block
                block = (expert * 2 * WIDTH + tl.program_id(1) * OUTPUTS) // BLOCK_ROWS
                scale_at = scale_ptr + block * NUM_GROUPS + at // GROUP
                gate_x = x * tl.load(scale_at, mask=is_input, other=0.0)
                up_x = x * tl.load(scale_at + WIDTH // BLOCK_ROWS * NUM_GROUPS, mask=is_input, other=0.0)
            gate += gate_weight.to(tl.float32) * gate_x[None, :]
            up += up_weight.to(tl.float32) * up_x[None, :]
        gate_sum, up_sum = tl.sum(gate, axis=1), tl.sum(up, axis=1)
        if IS_SCALED:
            gate_scale_at = scale_ptr + expert * 2 * WIDTH + output
            gate_sum *= tl.load(gate_scale_at, mask=output < WIDTH, other=0.0)
            up_sum *= tl.load(gate_scale_at + WIDTH, mask=output < WIDTH, other=0.0)
        gated = gate_sum * tl.sigmoid(gate_sum) * up_sum
        tl.store(out_ptr + pair * WIDTH + output, gated.to(out_ptr.dtype.element_ty), mask=output < WIDTH)


@triton.jit
def _down_kernel(  # type: ignore[no-untyped-def]
    gated_ptr,
    weight_ptr,
    scale_ptr,
    weights_ptr,
    experts_ptr,
    out_ptr,
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
    TOP_K: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    IS_PARTIAL: tl.constexpr,
    IS_SCALED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl_wait(PDL)
    token = tl.program_id(0).to(tl.int64)
    output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    column = tl.arange(0, INPUTS)
    sums = tl.zeros([OUTPUTS, INPUTS], tl.float32)
    NUM_GROUPS: tl.constexpr = (WIDTH + GROUP - 1) // GROUP
    NUM_STEPS: tl.constexpr = (WIDTH + INPUTS - 1) // INPUTS
    for step in tl.static_range(TOP_K * NUM_STEPS):  # unrolled, so that all experts' weights are on their way at once
        pair = token * TOP_K + step // NUM_STEPS
        at = step % NUM_STEPS * INPUTS + column
        expert = tl.load(experts_ptr + pair)
        weight = tl.load(weights_ptr + pair, mask=expert >= 0, other=0.0)
        row = weight_ptr + (expert * HIDDEN + output)[:, None] * WIDTH
        is_input = (at < WIDTH) & (expert >= 0) if IS_PARTIAL else at < WIDTH
        is_there = is_input[None, :] if HIDDEN % OUTPUTS == 0 else (output < HIDDEN)[:, None] & is_input[None, :]
        gated = tl.load(gated_ptr + pair * WIDTH + at, mask=is_input, other=0.0).to(tl.float32) * weight
        down = tl.load(row + at[None, :], mask=is_there, other=0.0)
        if BLOCK_ROWS > 0:
            block = expert * ((HIDDEN + BLOCK_ROWS - 1) // BLOCK_ROWS) + tl.program_id(1) * OUTPUTS // BLOCK_ROWS
            gated *= tl.load(scale_ptr + block * NUM_GROUPS + at // GROUP, mask=is_input, other=0.0)
        part = down.to(tl.float32) * gated[None, :]
        if IS_SCALED:
            is_output = (output < HIDDEN) & (expert >= 0)
            part *= tl.load(scale_ptr + expert * HIDDEN + output, mask=is_output, other=0.0)[:, None]
        sums += part
    out = tl.sum(sums, axis=1).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + token * HIDDEN + output, out, mask=output < HIDDEN)
