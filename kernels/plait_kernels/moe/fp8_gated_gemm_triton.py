"""Experts in FP8 with few rows each, in Triton: two grouped GEMMs, the first with the gate and the quantising in it.

Weights are the tall operand, whose tiles the tensor cores take as FP8 from shared memory; with 16 rows as the tall
operand Triton would convert every weight to float16 in registers. A program of the first GEMM makes the gates and the
ups of the same 128 outputs, so that it has a whole group of each row: its scale is known there, and neither gate nor up
is written.

Shapes: T tokens, E experts, K experts a token, H the hidden size, I an expert's width, J = 2 I, N = T K pairs of token
and expert.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from plait_kernels.linear.fp8 import GROUP, LARGEST, LEAST, MAX_FAST_INPUTS, Fp8Rows, Fp8Weight
from plait_kernels.linear.fp8_quantise_triton import empty_rows
from plait_kernels.moe.grouped_gemm_triton import Tile, launch_options, own_pairs
from plait_kernels.pdl import pdl_wait

GATE_UP, DOWN = Tile(16, GROUP, 128, 4, 3), Tile(16, 128, 128, 4, 3)
"""The first one's outputs are a group."""
GATE_UP_OF_MORE, DOWN_OF_MORE, _MORE = Tile(16, GROUP, 128, 4, 3), Tile(16, 128, 128, 4, 4), 4
"""For lists of more pairs on the average, on an H200 for DeepSeek-V2-Lite's shapes."""
Lists = tuple[Tensor, Tensor, int]
"""See ``list_pairs``; and the number of tokens."""


def few_rows_tiles(num_pairs_per_expert: float) -> tuple[Tile, Tile]:
    """Of ``gated_rows`` and ``down_parts``, by the mean length of an expert's list."""
    return (GATE_UP, DOWN) if num_pairs_per_expert <= _MORE else (GATE_UP_OF_MORE, DOWN_OF_MORE)


def gated_rows(rows: Fp8Rows, gate_up_EJH: Fp8Weight, lists: Lists, top_k: int, tile: Tile = GATE_UP) -> Fp8Rows:
    """``silu(gate) * up`` of each pair, ``[N, I]`` with a scale for each group; pair n's row is ``n // top_k``."""
    num_experts, num_outputs, num_inputs = gate_up_EJH.stored_OI.shape
    width = num_outputs // 2
    gated = empty_rows(rows.stored_NI, lists[2] * top_k, width, is_grouped=True)
    _gate_up_kernel[_grid(tile, width, num_experts, lists[2] * top_k)](
        rows.stored_NI,
        rows.scale,
        gate_up_EJH.stored_OI,
        gate_up_EJH.scale,
        gated.stored_NI,
        gated.scale,
        *lists,
        num_experts,
        rows.scale.stride(1),
        gated.scale.stride(1),
        WIDTH=width,
        NUM_INPUTS=num_inputs,
        TOP_K=top_k,
        EXPERTS=triton.next_power_of_2(num_experts),
        BLOCK_ROWS=gate_up_EJH.block_rows,
        IS_SHORT=num_inputs <= MAX_FAST_INPUTS,
        GROUP=GROUP,
        LARGEST=LARGEST,
        LEAST=LEAST,
        **launch_options(tile, gated.stored_NI),
    )
    return gated


def down_parts(gated: Fp8Rows, down_EHI: Fp8Weight, lists: Lists, parts_NH: Tensor, tile: Tile = DOWN) -> None:
    """The output of each pair, whose row has a scale for each group whatever scales the weights have."""
    num_experts, num_outputs, num_inputs = down_EHI.stored_OI.shape
    _down_kernel[_grid(tile, num_outputs, num_experts, len(gated.stored_NI))](
        gated.stored_NI,
        gated.scale,
        down_EHI.stored_OI,
        down_EHI.scale,
        parts_NH,
        *lists,
        num_experts,
        gated.scale.stride(1),
        NUM_OUTPUTS=num_outputs,
        NUM_INPUTS=num_inputs,
        EXPERTS=triton.next_power_of_2(num_experts),
        BLOCK_ROWS=down_EHI.block_rows,
        GROUP=GROUP,
        **launch_options(tile, parts_NH),
    )


def _grid(tile: Tile, num_outputs: int, num_experts: int, num_pairs: int) -> tuple[int, int]:
    """Programs for as many tiles as the lists can have: of an expert's rows only the last tile is not full.

    With room in each list for all tokens three of four programs would find nothing, one after another.
    """
    most_lists = min(num_experts, num_pairs)
    return triton.cdiv(num_outputs, tile.outputs), (num_pairs + most_lists * (tile.rows - 1)) // tile.rows


@triton.jit(do_not_specialize=["num_tokens", "num_experts", "scale_stride", "gated_stride"])  # type: ignore[untyped-decorator]
def _gate_up_kernel(  # type: ignore[no-untyped-def]  # budget: one loop over the inputs
    x_ptr,
    x_scale_ptr,
    weight_ptr,
    scale_ptr,
    gated_ptr,
    gated_scale_ptr,
    lists_ptr,
    counts_ptr,
    num_tokens,
    num_experts,
    scale_stride,
    gated_stride,
    WIDTH: tl.constexpr,
    NUM_INPUTS: tl.constexpr,
    TOP_K: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    IS_SHORT: tl.constexpr,
    GROUP: tl.constexpr,
    LARGEST: tl.constexpr,
    LEAST: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    PDL: tl.constexpr,
):
    tl.static_assert(OUTPUTS == GROUP)
    tl.static_assert(BLOCK_ROWS == 0 or INPUTS == GROUP)
    pdl_wait(PDL)
    expert, first, count = _nth_tile(counts_ptr, num_experts, EXPERTS, ROWS)
    if first < count:
        pair, is_entry = own_pairs(lists_ptr, expert, num_tokens, first, count, ROWS)
        row = pair // TOP_K
        output, column = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS), tl.arange(0, INPUTS)
        is_output = output < WIDTH
        own = tl.minimum(output, WIDTH - 1)  # what is beyond is dropped
        x_at = x_ptr + row[None, :] * NUM_INPUTS + column[:, None]
        gate_at = weight_ptr + (expert.to(tl.int64) * 2 * WIDTH + own)[:, None] * NUM_INPUTS + column[None, :]
        up_at = gate_at + WIDTH * NUM_INPUTS
        gate, up = tl.zeros([OUTPUTS, ROWS], tl.float32), tl.zeros([OUTPUTS, ROWS], tl.float32)
        for begin in range(0, NUM_INPUTS, INPUTS):
            is_input = begin + column < NUM_INPUTS
            x = tl.load(x_at + begin, mask=is_entry[None, :] & is_input[:, None], other=0.0)
            if NUM_INPUTS % INPUTS == 0:
                gates, ups = tl.load(gate_at + begin), tl.load(up_at + begin)
            else:
                gates = tl.load(gate_at + begin, mask=is_input[None, :], other=0.0)
                ups = tl.load(up_at + begin, mask=is_input[None, :], other=0.0)
            if BLOCK_ROWS > 0:
                group = begin // GROUP
                x_scale = tl.load(x_scale_ptr + group * scale_stride + row, mask=is_entry, other=0.0)[None, :]
                scale_of = scale_ptr, expert, group, own
                gate_scale = _block_scale(*scale_of, 0, 2 * WIDTH, NUM_INPUTS, BLOCK_ROWS, GROUP, OUTPUTS)
                up_scale = _block_scale(*scale_of, WIDTH, 2 * WIDTH, NUM_INPUTS, BLOCK_ROWS, GROUP, OUTPUTS)
                gate += tl.dot(gates, x) * (x_scale * gate_scale)
                up += tl.dot(ups, x) * (x_scale * up_scale)
            elif IS_SHORT:
                gate, up = tl.dot(gates, x, gate), tl.dot(ups, x, up)
            else:
                gate += tl.dot(gates, x)
                up += tl.dot(ups, x)
        if BLOCK_ROWS == 0:
            x_scale = tl.load(x_scale_ptr + row, mask=is_entry, other=0.0)[None, :]
            scale_at = scale_ptr + expert * 2 * WIDTH + own
            gate *= x_scale * tl.load(scale_at)[:, None]
            up *= x_scale * tl.load(scale_at + WIDTH)[:, None]
        gated = tl.where(is_output[:, None], gate * tl.sigmoid(gate) * up, 0.0)
        largest = tl.max(tl.abs(gated), axis=0)
        stored = gated * tl.where(largest < LEAST, 0.0, LARGEST / largest)[None, :]
        tl.store(gated_scale_ptr + tl.program_id(0) * gated_stride + pair, largest / LARGEST, mask=is_entry)
        gated_at = gated_ptr + pair[None, :] * WIDTH + output[:, None]
        tl.store(gated_at, stored.to(gated_ptr.dtype.element_ty), mask=is_output[:, None] & is_entry[None, :])


@triton.jit(do_not_specialize=["num_tokens", "num_experts", "scale_stride"])  # type: ignore[untyped-decorator]
def _down_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    x_scale_ptr,
    weight_ptr,
    scale_ptr,
    out_ptr,
    lists_ptr,
    counts_ptr,
    num_tokens,
    num_experts,
    scale_stride,
    NUM_OUTPUTS: tl.constexpr,
    NUM_INPUTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    PDL: tl.constexpr,
):
    tl.static_assert(INPUTS == GROUP)
    pdl_wait(PDL)
    expert, first, count = _nth_tile(counts_ptr, num_experts, EXPERTS, ROWS)
    if first < count:
        pair, is_entry = own_pairs(lists_ptr, expert, num_tokens, first, count, ROWS)
        output, column = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS), tl.arange(0, INPUTS)
        own = tl.minimum(output, NUM_OUTPUTS - 1)
        x_at = x_ptr + pair[None, :] * NUM_INPUTS + column[:, None]
        weight_at = weight_ptr + (expert.to(tl.int64) * NUM_OUTPUTS + own)[:, None] * NUM_INPUTS + column[None, :]
        sums = tl.zeros([OUTPUTS, ROWS], tl.float32)
        for begin in range(0, NUM_INPUTS, INPUTS):
            group = begin // GROUP
            scale = tl.load(x_scale_ptr + group * scale_stride + pair, mask=is_entry, other=0.0)[None, :]
            if BLOCK_ROWS > 0:
                scale_of = scale_ptr, expert, group, own
                scale *= _block_scale(*scale_of, 0, NUM_OUTPUTS, NUM_INPUTS, BLOCK_ROWS, GROUP, OUTPUTS)
            is_input = begin + column < NUM_INPUTS
            x = tl.load(x_at + begin, mask=is_entry[None, :] & is_input[:, None], other=0.0)
            if NUM_INPUTS % INPUTS == 0:
                weight = tl.load(weight_at + begin)
            else:
                weight = tl.load(weight_at + begin, mask=is_input[None, :], other=0.0)
            sums += tl.dot(weight, x) * scale
        if BLOCK_ROWS == 0:
            sums *= tl.load(scale_ptr + expert * NUM_OUTPUTS + own)[:, None]
        out_at = out_ptr + pair[None, :] * NUM_OUTPUTS + output[:, None]
        is_there = (output < NUM_OUTPUTS)[:, None] & is_entry[None, :]
        tl.store(out_at, sums.to(out_ptr.dtype.element_ty), mask=is_there)


@triton.jit  # type: ignore[untyped-decorator]
def _block_scale(  # type: ignore[no-untyped-def]
    scale_ptr,
    expert,
    group,
    output,
    FIRST: tl.constexpr,
    NUM_OUTPUTS: tl.constexpr,
    NUM_INPUTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    OUTPUTS: tl.constexpr,
):
    """Of the outputs from ``FIRST`` on, for a group of inputs: one number, or a column of them."""
    NUM_GROUPS: tl.constexpr = (NUM_INPUTS + GROUP - 1) // GROUP
    begin = expert * ((NUM_OUTPUTS + BLOCK_ROWS - 1) // BLOCK_ROWS)
    if FIRST % BLOCK_ROWS == 0 and BLOCK_ROWS % OUTPUTS == 0:
        block = (FIRST + tl.program_id(0) * OUTPUTS) // BLOCK_ROWS
        scale = tl.load(scale_ptr + (begin + block) * NUM_GROUPS + group)
    else:
        scale = tl.load(scale_ptr + (begin + (FIRST + output) // BLOCK_ROWS) * NUM_GROUPS + group)[:, None]
    return scale


@triton.jit  # type: ignore[untyped-decorator]
def _nth_tile(counts_ptr, num_experts, EXPERTS: tl.constexpr, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """As ``own_tile``, of the tiles that there are; of those beyond the length is 0."""
    expert = tl.arange(0, EXPERTS)
    count = tl.load(counts_ptr + expert, mask=expert < num_experts, other=0)
    tiles = (count + ROWS - 1) // ROWS
    nth = tl.program_id(1)
    is_before = tl.cumsum(tiles, axis=0) <= nth
    own = tl.sum(is_before.to(tl.int32), axis=0)
    first = (nth - tl.sum(tl.where(is_before, tiles, 0), axis=0)) * ROWS
    return own, first, tl.sum(tl.where(expert == own, count, 0), axis=0)
