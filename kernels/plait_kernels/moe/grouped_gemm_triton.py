"""Experts of up to some thousand tokens in Triton: (token, expert) pairs listed by expert, then two grouped GEMMs.

Each expert's list has room for all tokens, so that no launch waits for the lists' lengths.

Shapes: T tokens, E experts, K experts a token, H the hidden size, I an expert's width, N = T K pairs of token and
expert.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from plait_kernels.pdl import pdl_launch, pdl_wait

_LISTED = 1024
_COMBINED = 256
"""Columns of a warp, eight a thread. It has all parts of them, which a program of one warp reads at once."""
_MAX_NARROW = 1024
"""Above so many tokens there are programs enough without narrow ones."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Tile sizes of one grouped GEMM."""

    rows: int
    outputs: int
    inputs: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class Tiles:
    """Those of both GEMMs."""

    gate_up: Tile
    down: Tile


_NARROW = 352
"""A quarter of DeepSeek-V2-Lite's width: too few programs to hide what one waits for."""


def tiles_for(num_pairs_per_expert: float, width: int) -> Tiles:
    """By the mean length of an expert's list, tuned on an H200: weights are read once where its rows fit one tile.

    Few rows leave no time for outputs that are not there: ``width`` is that of an expert, or of a rank's shard of it.
    """
    is_narrow = width <= _NARROW
    if num_pairs_per_expert <= 12:
        gate_up = Tile(16, 64, 128, 4, 3) if width % 128 else Tile(16, 128, 128, 4, 2)
        if is_narrow and num_pairs_per_expert > 6:
            gate_up = Tile(32, 64, 128, 4, 2)
        return Tiles(gate_up, Tile(16, 128, 128, 4, 3))
    if num_pairs_per_expert <= 24:
        return Tiles(Tile(32, 64, 128, 4, 2), Tile(32, 64, 128, 4, 2))
    if num_pairs_per_expert <= 90:
        return Tiles(Tile(64, 64, 64, 4, 4 if is_narrow else 3), Tile(64, 128, 64, 4, 3))
    return Tiles(Tile(128, 128, 64, 8, 3), Tile(128, 128, 64, 8, 3))


def expert_mlps(x_TH: Tensor, gate_up_EJH: Tensor, down_EHI: Tensor, weights_TK: Tensor, experts_TK: Tensor) -> Tensor:
    """See ``plait_kernels.moe.expert_mlps``; all contiguous, sums float32, an expert's result rounded once."""
    parts_NH = expert_parts(x_TH, gate_up_EJH, down_EHI, experts_TK, experts_TK.numel() / len(down_EHI))
    out_TH = torch.empty_like(x_TH)
    combine(parts_NH, weights_TK, out_TH)
    return out_TH


def expert_parts(
    x_TH: Tensor, gate_up_EJH: Tensor, down_EHI: Tensor, experts_TK: Tensor, num_pairs_per_expert: float
) -> Tensor:
    """Each pair's output, ``[N, H]``; that of a pair whose expert is -1 is left as it was."""
    num_tokens, top_k = experts_TK.shape
    num_experts, hidden_size, width = down_EHI.shape
    tiles = tiles_for(num_pairs_per_expert, width)
    lists = (*list_pairs(experts_TK, num_experts), num_tokens)
    gated_NI = x_TH.new_empty(num_tokens * top_k, width)
    parts_NH = x_TH.new_empty(num_tokens * top_k, hidden_size)
    sizes = {"HIDDEN": hidden_size, "WIDTH": width}
    _gate_up_grouped_kernel[grouped_grid(tiles.gate_up, width, num_experts, num_tokens)](
        x_TH, gate_up_EJH, gated_NI, *lists, TOP_K=top_k, **sizes, **launch_options(tiles.gate_up, x_TH)
    )
    _down_grouped_kernel[grouped_grid(tiles.down, hidden_size, num_experts, num_tokens)](
        gated_NI, down_EHI, parts_NH, *lists, **sizes, **launch_options(tiles.down, x_TH)
    )
    return parts_NH


def grouped_grid(tile: Tile, num_outputs: int, num_experts: int, num_tokens: int) -> tuple[int, int]:
    return triton.cdiv(num_outputs, tile.outputs), num_experts * triton.cdiv(num_tokens, tile.rows)


def launch_options(tile: Tile, like: Tensor) -> dict[str, int | bool]:
    cut = {"ROWS": tile.rows, "OUTPUTS": tile.outputs, "INPUTS": tile.inputs}
    return {**cut, "num_warps": tile.num_warps, "num_stages": tile.num_stages, **pdl_launch(like)}


def combine(parts_NH: Tensor, weights_TK: Tensor, out_TH: Tensor, index_N: Tensor | None = None) -> None:
    """The weighted sum of each token's expert outputs; pair n's is row ``index_N[n]`` (int64), or row n."""
    num_tokens, hidden_size = out_TH.shape
    top_k, num_warps = weights_TK.shape[1], 1 if num_tokens <= _MAX_NARROW else 4
    block = _COMBINED * num_warps
    _combine_kernel[(num_tokens, triton.cdiv(hidden_size, block))](
        parts_NH,
        weights_TK,
        weights_TK if index_N is None else index_N,
        out_TH,
        HIDDEN=hidden_size,
        TOP_K=top_k,
        RANKS=triton.next_power_of_2(top_k),
        HAS_INDEX=index_N is not None,
        BLOCK=block,
        num_warps=num_warps,
        **pdl_launch(out_TH),
    )


def list_pairs(experts_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Each expert's pairs in order, ``[E, T]``, and their number, ``[E]``; both int32."""
    num_tokens = experts_TK.shape[0]
    lists_ET = torch.empty(num_experts, num_tokens, dtype=torch.int32, device=experts_TK.device)
    counts_E = torch.empty(num_experts, dtype=torch.int32, device=experts_TK.device)
    num_pairs = experts_TK.numel()
    block = min(_LISTED, triton.next_power_of_2(num_pairs))
    num_blocks = triton.next_power_of_2(triton.cdiv(num_pairs, block))
    where = (experts_TK, lists_ET, counts_E, num_pairs, num_tokens)
    _list_pairs_by_expert_kernel[(num_experts,)](
        *where, NUM_BLOCKS=num_blocks, BLOCK=block, num_warps=4, **pdl_launch(experts_TK)
    )
    return lists_ET, counts_E


@triton.jit(do_not_specialize=["num_pairs", "num_tokens"])
def _list_pairs_by_expert_kernel(  # type: ignore[no-untyped-def]
    experts_ptr,
    lists_ptr,
    counts_ptr,
    num_pairs,
    num_tokens,
    NUM_BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl_wait(PDL)
    expert = tl.program_id(0)
    count = 0
    for block in range(NUM_BLOCKS):
        pair = block * BLOCK + tl.arange(0, BLOCK)
        is_own = tl.load(experts_ptr + pair, mask=pair < num_pairs, other=-1) == expert
        ones = is_own.to(tl.int32)
        entry = count + tl.cumsum(ones, axis=0) - 1
        tl.store(lists_ptr + expert * num_tokens + entry, pair, mask=is_own & (entry < num_tokens))
        count += tl.sum(ones, axis=0)
    # No router has a token name an expert twice; what did not fit the list was dropped.
    tl.store(counts_ptr + expert, tl.minimum(count, num_tokens))


@triton.jit
def own_tile(counts_ptr, num_tokens, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """A program's expert, the first of its rows in the expert's list, and how long that is."""
    tiles = (num_tokens + ROWS - 1) // ROWS
    expert, first = tl.program_id(1) // tiles, tl.program_id(1) % tiles * ROWS
    return expert, first, tl.load(counts_ptr + expert)


@triton.jit
def own_pairs(lists_ptr, expert, num_tokens, first, count, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The pairs of those rows, and which of them there are."""
    entry = first + tl.arange(0, ROWS)
    is_entry = entry < count
    pair = tl.load(lists_ptr + expert * num_tokens + entry, mask=is_entry, other=0)
    return pair.to(tl.int64), is_entry


@triton.jit(do_not_specialize=["num_tokens"])
def _gate_up_grouped_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    weight_ptr,
    out_ptr,
    lists_ptr,
    counts_ptr,
    num_tokens,
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl_wait(PDL)
    expert, first, count = own_tile(counts_ptr, num_tokens, ROWS)
    if first < count:
        pair, is_entry = own_pairs(lists_ptr, expert, num_tokens, first, count, ROWS)
        output, column = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS), tl.arange(0, INPUTS)
        is_output = output < WIDTH
        x_at = x_ptr + (pair // TOP_K)[:, None] * HIDDEN + column[None, :]
        gate_at = weight_ptr + (expert.to(tl.int64) * 2 * WIDTH + output)[None, :] * HIDDEN + column[:, None]
        up_at = gate_at + WIDTH * HIDDEN
        gate, up = tl.zeros([ROWS, OUTPUTS], tl.float32), tl.zeros([ROWS, OUTPUTS], tl.float32)
        for begin in range(0, HIDDEN, INPUTS):
            is_input = begin + column < HIDDEN
            x = tl.load(x_at + begin, mask=is_entry[:, None] & is_input[None, :], other=0.0)
            is_weight = is_input[:, None] & is_output[None, :]
            gate = tl.dot(x, tl.load(gate_at + begin, mask=is_weight, other=0.0), gate)
            up = tl.dot(x, tl.load(up_at + begin, mask=is_weight, other=0.0), up)
        gated = (gate * tl.sigmoid(gate) * up).to(out_ptr.dtype.element_ty)
        out_at = out_ptr + pair[:, None] * WIDTH + output[None, :]
        tl.store(out_at, gated, mask=is_entry[:, None] & is_output[None, :])


@triton.jit(do_not_specialize=["num_tokens"])
def _down_grouped_kernel(  # type: ignore[no-untyped-def]
    gated_ptr,
    weight_ptr,
    out_ptr,
    lists_ptr,
    counts_ptr,
    num_tokens,
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl_wait(PDL)
    expert, first, count = own_tile(counts_ptr, num_tokens, ROWS)
    if first < count:
        pair, is_entry = own_pairs(lists_ptr, expert, num_tokens, first, count, ROWS)
        output, column = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS), tl.arange(0, INPUTS)
        is_output = output < HIDDEN
        gated_at = gated_ptr + pair[:, None] * WIDTH + column[None, :]
        weight_at = weight_ptr + (expert.to(tl.int64) * HIDDEN + output)[None, :] * WIDTH + column[:, None]
        sums = tl.zeros([ROWS, OUTPUTS], tl.float32)
        for begin in range(0, WIDTH, INPUTS):
            is_input = begin + column < WIDTH
            gated = tl.load(gated_at + begin, mask=is_entry[:, None] & is_input[None, :], other=0.0)
            weight = tl.load(weight_at + begin, mask=is_input[:, None] & is_output[None, :], other=0.0)
            sums = tl.dot(gated, weight, sums)
        out_at = out_ptr + pair[:, None] * HIDDEN + output[None, :]
        tl.store(out_at, sums.to(out_ptr.dtype.element_ty), mask=is_entry[:, None] & is_output[None, :])


@triton.jit
def _combine_kernel(  # type: ignore[no-untyped-def]
    parts_ptr,
    weights_ptr,
    index_ptr,
    out_ptr,
    HIDDEN: tl.constexpr,
    TOP_K: tl.constexpr,
    RANKS: tl.constexpr,
    HAS_INDEX: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl_wait(PDL)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    rank = tl.arange(0, RANKS)
    is_rank, is_there = rank < TOP_K, column < HIDDEN
    pair = token * TOP_K + rank
    row = pair
    if HAS_INDEX:
        row = tl.load(index_ptr + pair, mask=is_rank, other=0)
    parts_at = parts_ptr + row[:, None] * HIDDEN + column[None, :]
    parts = tl.load(parts_at, mask=is_rank[:, None] & is_there[None, :], other=0.0)
    weights = tl.load(weights_ptr + pair, mask=is_rank, other=0.0)
    out = tl.sum(parts.to(tl.float32) * weights[:, None], axis=0)
    tl.store(out_ptr + token * HIDDEN + column, out.to(out_ptr.dtype.element_ty), mask=is_there)
