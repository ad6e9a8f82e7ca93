"""Experts in FP8 for three tokens or more in Triton: rows are quantised, and a grouped GEMM goes by lists of pairs.

Weights have a scale for each block, and rows one for each 128 elements, or each output and each row has one.

Shapes: T tokens, E experts, K experts a token, H the hidden size, I an expert's width, J = 2 I, N = T K pairs of token
and expert.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from plait_kernels.linear.fp8 import GROUP, MAX_FAST_INPUTS, Fp8Rows, Fp8Weight
from plait_kernels.linear.fp8_quantise_triton import quantise_rows, silu_mul_quantise
from plait_kernels.moe.fp8_experts import has_few_rows
from plait_kernels.moe.fp8_gated_gemm_triton import down_parts, few_rows_tiles, gated_rows
from plait_kernels.moe.grouped_gemm_triton import Tile, grouped_grid, launch_options, list_pairs, own_pairs, own_tile
from plait_kernels.pdl import pdl_wait

_NUM_LONG = 100
"""Pairs of an expert on the average."""


def tile_for(num_pairs_per_expert: float, *, is_grouped: bool) -> Tile:
    """By the mean length of an expert's list, the fastest of 13 on an H200 for DeepSeek-V2-Lite's shapes.

    ``has_few_rows`` says which lists go another way. Torch's scaled grouped GEMM was 2% faster at 8,192 tokens, and
    slower below.
    """
    if is_grouped or num_pairs_per_expert <= _NUM_LONG:
        return Tile(64, 128, 128, 4, 3)
    return Tile(128, 128, 128, 8, 3)


def expert_parts(
    x_TH: Tensor,
    gate_up_EJH: Fp8Weight,
    down_EHI: Fp8Weight,
    experts_TK: Tensor,
    num_pairs_per_expert: float,
    rows: Fp8Rows | None = None,
) -> Tensor:
    """Each pair's output, ``[N, H]``; that of a pair whose expert is -1 has any value.

    ``rows`` are ``x_TH`` if it has been quantised.
    """
    num_tokens, top_k = experts_TK.shape
    num_experts, hidden_size, _ = down_EHI.stored_OI.shape
    lists = (*list_pairs(experts_TK, num_experts), num_tokens)
    is_grouped = gate_up_EJH.block_rows > 0
    rows = quantise_rows(x_TH, is_grouped=is_grouped) if rows is None else rows
    parts_NH = x_TH.new_empty(num_tokens * top_k, hidden_size)
    if has_few_rows(num_pairs_per_expert):
        tiles = few_rows_tiles(num_pairs_per_expert)
        down_parts(gated_rows(rows, gate_up_EJH, lists, top_k, tiles[0]), down_EHI, lists, parts_NH, tiles[1])
        return parts_NH
    tile = tile_for(num_pairs_per_expert, is_grouped=is_grouped)
    gate_up_NJ = x_TH.new_empty(num_tokens * top_k, gate_up_EJH.stored_OI.shape[1])
    _grouped_gemm(rows, gate_up_EJH, gate_up_NJ, lists, top_k, tile)
    _grouped_gemm(silu_mul_quantise(gate_up_NJ, is_grouped=is_grouped), down_EHI, parts_NH, lists, 1, tile)
    return parts_NH


def _grouped_gemm(
    rows: Fp8Rows, weight: Fp8Weight, out_NO: Tensor, lists: tuple[Tensor, Tensor, int], top_k: int, tile: Tile
) -> None:
    """Pair n's row is ``n // top_k``."""
    num_experts, num_outputs, num_inputs = weight.stored_OI.shape
    _fp8_grouped_kernel[grouped_grid(tile, num_outputs, num_experts, lists[2])](
        rows.stored_NI,
        rows.scale,
        weight.stored_OI,
        weight.scale,
        out_NO,
        *lists,
        rows.scale.stride(1),
        NUM_OUTPUTS=num_outputs,
        NUM_INPUTS=num_inputs,
        TOP_K=top_k,
        IS_EVEN=num_outputs % tile.outputs == 0 and num_inputs % tile.inputs == 0,
        BLOCK_ROWS=weight.block_rows,
        IS_SHORT=weight.block_rows == 0 and num_inputs <= MAX_FAST_INPUTS,
        GROUP=GROUP,
        **launch_options(tile, out_NO),
    )


@triton.jit(do_not_specialize=["num_tokens", "scale_stride"])  # type: ignore[untyped-decorator]
def _fp8_grouped_kernel(  # type: ignore[no-untyped-def]  # budget: one loop over the inputs
    x_ptr,
    x_scale_ptr,
    weight_ptr,
    scale_ptr,
    out_ptr,
    lists_ptr,
    counts_ptr,
    num_tokens,
    scale_stride,
    NUM_OUTPUTS: tl.constexpr,
    NUM_INPUTS: tl.constexpr,
    TOP_K: tl.constexpr,
    IS_EVEN: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    IS_SHORT: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl_wait(PDL)
    expert, first, count = own_tile(counts_ptr, num_tokens, ROWS)
    if first < count:
        pair, is_entry = own_pairs(lists_ptr, expert, num_tokens, first, count, ROWS)
        row = pair // TOP_K
        output, column = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS), tl.arange(0, INPUTS)
        is_output = output < NUM_OUTPUTS
        NUM_GROUPS: tl.constexpr = (NUM_INPUTS + GROUP - 1) // GROUP
        x_at = x_ptr + row[:, None] * NUM_INPUTS + column[None, :]
        weight_at = weight_ptr + (expert.to(tl.int64) * NUM_OUTPUTS + output)[None, :] * NUM_INPUTS + column[:, None]
        sums = tl.zeros([ROWS, OUTPUTS], tl.float32)
        for begin in range(0, NUM_INPUTS, INPUTS):
            if IS_EVEN:
                x = tl.load(x_at + begin, mask=is_entry[:, None], other=0.0)
                weight = tl.load(weight_at + begin)
            else:
                is_input = begin + column < NUM_INPUTS
                x = tl.load(x_at + begin, mask=is_entry[:, None] & is_input[None, :], other=0.0)
                weight = tl.load(weight_at + begin, mask=is_input[:, None] & is_output[None, :], other=0.0)
            if IS_SHORT:
                sums = tl.dot(x, weight, sums)
            elif BLOCK_ROWS == 0:
                sums += tl.dot(x, weight)
            else:
                part = tl.dot(x, weight)
                group = begin // GROUP
                x_scale = tl.load(x_scale_ptr + group * scale_stride + row, mask=is_entry, other=0.0)
                if BLOCK_ROWS >= OUTPUTS:
                    block = (
                        expert * ((NUM_OUTPUTS + BLOCK_ROWS - 1) // BLOCK_ROWS)
                        + tl.program_id(0) * OUTPUTS // BLOCK_ROWS
                    )
                    w_scale = tl.load(scale_ptr + block * NUM_GROUPS + group)
                    sums += part * (x_scale * w_scale)[:, None]
                else:
                    blocks = expert * ((NUM_OUTPUTS + BLOCK_ROWS - 1) // BLOCK_ROWS) + output // BLOCK_ROWS
                    w_scale = tl.load(scale_ptr + blocks * NUM_GROUPS + group, mask=is_output, other=0.0)
                    sums += part * x_scale[:, None] * w_scale[None, :]
        if BLOCK_ROWS == 0:
            sums *= tl.load(x_scale_ptr + row, mask=is_entry, other=0.0)[:, None]
            sums *= tl.load(scale_ptr + expert * NUM_OUTPUTS + output, mask=is_output, other=0.0)[None, :]
        out_at = out_ptr + pair[:, None] * NUM_OUTPUTS + output[None, :]
        tl.store(out_at, sums.to(out_ptr.dtype.element_ty), mask=is_entry[:, None] & is_output[None, :])
