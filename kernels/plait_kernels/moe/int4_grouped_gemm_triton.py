"""Experts in 4 bits in Triton: a grouped GEMM goes by lists of pairs, and codes become values in registers.

Shapes: T tokens, E experts, K experts a token, H the hidden size, I an expert's width, J = 2 I, N = T K pairs of token
and expert.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from plait_kernels.activation import silu_mul
from plait_kernels.linear.int4 import CHUNK, Int4Weight
from plait_kernels.linear.int4_gemm_triton import chunk_sums
from plait_kernels.linear.int4_planes_triton import coding, zeros_of
from plait_kernels.moe.grouped_gemm_triton import Tile, grouped_grid, list_pairs, own_pairs, own_tile
from plait_kernels.pdl import pdl_launch, pdl_wait


def tile_for(num_pairs_per_expert: float) -> Tile:
    """By the mean length of an expert's list; a warp has 16 outputs, as the words lie."""
    if num_pairs_per_expert <= 5:
        return Tile(8, 64, 256, 4, 4)
    if num_pairs_per_expert <= 30:
        return Tile(32, 128, 128, 8, 3)
    if num_pairs_per_expert <= 50:
        return Tile(64, 128, 128, 8, 3)
    return Tile(128, 128, 128, 8, 3)


def expert_parts(
    x_TH: Tensor,
    gate_up_EJH: Int4Weight,
    down_EHI: Int4Weight,
    experts_TK: Tensor,
    num_pairs_per_expert: float,
    tile: Tile | None = None,
) -> Tensor:
    """Each pair's output, ``[N, H]``; that of a pair whose expert is -1 has any value."""
    num_tokens, top_k = experts_TK.shape
    lists = (*list_pairs(experts_TK, len(down_EHI.codes)), num_tokens)
    tile = tile or tile_for(num_pairs_per_expert)
    gate_up_NJ = x_TH.new_empty(num_tokens * top_k, gate_up_EJH.shape[0])
    _grouped_gemm(x_TH.contiguous(), gate_up_EJH, gate_up_NJ, lists, top_k, tile)
    parts_NH = x_TH.new_empty(num_tokens * top_k, down_EHI.shape[0])
    _grouped_gemm(silu_mul(gate_up_NJ), down_EHI, parts_NH, lists, 1, tile)
    return parts_NH


def _grouped_gemm(
    x_NI: Tensor, weight: Int4Weight, out_NO: Tensor, lists: tuple[Tensor, Tensor, int], top_k: int, tile: Tile
) -> None:
    """Pair n's row is ``n // top_k``."""
    num_outputs, num_chunks = weight.shape[0], weight.codes.shape[-4]
    if lists[2] == 0:
        return
    _int4_grouped_kernel[grouped_grid(tile, num_outputs, len(weight.codes), lists[2])](
        x_NI,
        weight.codes,
        weight.scale,
        zeros_of(weight),
        out_NO,
        *lists,
        num_outputs,
        TOP_K=top_k,
        NUM_GROUPS=weight.scale.shape[-2],
        IS_EVEN=weight.num_inputs % CHUNK == 0,
        ROWS=tile.rows,
        OUTPUTS=tile.outputs,
        AT_ONCE=math.gcd(tile.inputs // CHUNK, num_chunks),
        **coding(weight, x_NI),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **pdl_launch(out_NO),
    )


@triton.jit(do_not_specialize=["num_tokens"])
def _int4_grouped_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    codes_ptr,
    scale_ptr,
    zero_ptr,
    out_ptr,
    lists_ptr,
    counts_ptr,
    num_tokens,
    num_outputs,
    NUM_INPUTS: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    IS_FLOAT: tl.constexpr,
    PAIRS: tl.constexpr,
    TOP_K: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    IS_EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl_wait(PDL)
    expert, first, count = own_tile(counts_ptr, num_tokens, ROWS)
    if first < count:
        pair, is_entry = own_pairs(lists_ptr, expert, num_tokens, first, count, ROWS)
        size = num_outputs.to(tl.int64)
        x_at = x_ptr + (pair // TOP_K)[None, :] * NUM_INPUTS
        codes_at = codes_ptr + expert * (size * NUM_CHUNKS * 32)
        scale_at, zero_at = scale_ptr + expert * (size * NUM_GROUPS), zero_ptr + expert * (size * NUM_GROUPS)
        sums = chunk_sums(
            *(x_at, is_entry, codes_at, scale_at, zero_at, tl.program_id(0) * (OUTPUTS // 16), num_outputs),
            *(0, NUM_CHUNKS, NUM_INPUTS, NUM_CHUNKS),
            *(GROUP, HAS_ZERO, IS_FLOAT, PAIRS, IS_EVEN, ROWS, OUTPUTS, AT_ONCE),
        )
        output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
        out_at = out_ptr + pair[None, :] * size + output[:, None]
        is_there = is_entry[None, :] & (output < num_outputs)[:, None]
        tl.store(out_at, sums.to(out_ptr.dtype.element_ty), mask=is_there)
