"""Few absorbed queries over pages of latents in Triton: a program takes a row's share of its tokens, for some heads.

What is cached of a token is key and value of every head, so that it is read once for both. A row is divided among
several programs, how many fixed by the number of rows, never by the lengths, which are read on the device: a captured
step replays at any depth.

Shapes: B rows, H heads, L numbers in a latent, C cached of a token, N pages of P tokens, S shares of a row.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from plait_kernels.attention.triton import merge_shares, num_shares
from plait_kernels.dependent import overlap, start

_HEADS = 16
"""The fewest rows that the matrix units take."""
_TOKENS = 32
"""Read at a time: so few that a short context, too, is spread over the device."""
_PROGRAMS_PER_SM = 1
_LAUNCH = {"num_warps": 4, "num_stages": 5}
"""The fastest of six on an H200, from 200 to 16,000 tokens of one row and of two."""


def decode_few(
    q_BHC: Tensor, pages: Tensor, table_BW: Tensor, lengths_B: Tensor, latent_dim: int, scale: float, page_scale: float
) -> Tensor:
    """See ``plait_kernels.latent.decode_few``."""
    num_rows, num_heads, cached_dim = q_BHC.shape
    groups = triton.cdiv(num_heads, _HEADS)
    shares = num_shares(num_rows * groups, _PROGRAMS_PER_SM, q_BHC.device)
    parts = q_BHC.new_empty(num_rows, num_heads, shares, latent_dim, dtype=torch.float32)
    sums = parts.new_empty(num_rows, num_heads, shares)
    _decode_latents[(num_rows, groups, shares)](
        q_BHC,
        pages,
        table_BW,
        lengths_B,
        parts,
        sums,
        scale * page_scale * math.log2(math.e),
        page_scale,
        table_BW.stride(0),
        NUM_HEADS=num_heads,
        HEADS=_HEADS,
        LATENT=latent_dim,
        TURNED=cached_dim - latent_dim,
        PAGE=pages.shape[1],
        TOKENS=min(_TOKENS, pages.shape[1]),
        SHARES=shares,
        **_LAUNCH,
        **overlap(q_BHC),
    )
    out_BHL = q_BHC.new_empty(num_rows, num_heads, latent_dim)
    merge_shares(parts, sums, out_BHL)
    return out_BHL


@triton.jit(do_not_specialize=["table_stride"])
def _decode_latents(  # type: ignore[no-untyped-def]
    q_ptr,
    pages_ptr,
    table_ptr,
    lengths_ptr,
    parts_ptr,
    sums_ptr,
    scale,
    page_scale,
    table_stride,
    NUM_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    TURNED: tl.constexpr,
    PAGE: tl.constexpr,
    TOKENS: tl.constexpr,
    SHARES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    start(OVERLAP)
    row, share = tl.program_id(0).to(tl.int64), tl.program_id(2)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    number, turned, token = tl.arange(0, LATENT), tl.arange(0, TURNED), tl.arange(0, TOKENS)
    is_head = (head < NUM_HEADS)[:, None]
    length = tl.load(lengths_ptr + row)
    num_tiles = (length + TOKENS - 1) // TOKENS
    per_share = (num_tiles + SHARES - 1) // SHARES
    first, last = share * per_share, tl.minimum((share + 1) * per_share, num_tiles)
    at = (row * NUM_HEADS + head) * SHARES + share
    best = tl.full([HEADS], -float("inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    out = tl.zeros([HEADS, LATENT], tl.float32)
    if first < last:
        q_at = q_ptr + (row * NUM_HEADS + head)[:, None] * (LATENT + TURNED)
        q = tl.load(q_at + number[None, :], mask=is_head, other=0.0)
        q_turned = tl.load(q_at + LATENT + turned[None, :], mask=is_head, other=0.0)
        for tile in range(first, last):
            place = tile * TOKENS + token
            page = tl.load(table_ptr + row * table_stride + tile * TOKENS // PAGE).to(tl.int64)
            cached_at = pages_ptr + (page * PAGE + place % PAGE)[:, None] * (LATENT + TURNED)
            is_seen = place < length
            latent = tl.load(cached_at + number[None, :], mask=is_seen[:, None], other=0.0).to(q.dtype)
            key = tl.load(cached_at + LATENT + turned[None, :], mask=is_seen[:, None], other=0.0).to(q.dtype)
            scores = tl.dot(q_turned, tl.trans(key), tl.dot(q, tl.trans(latent), input_precision="ieee"))
            scores = tl.where(is_seen[None, :], scores * scale, -float("inf"))
            new_best = tl.maximum(best, tl.max(scores, axis=1))
            weights = tl.exp2(scores - new_best[:, None])
            fade = tl.exp2(best - new_best)
            total = total * fade + tl.sum(weights, axis=1)
            out = out * fade[:, None] + tl.dot(weights.to(latent.dtype), latent, input_precision="ieee")
            best = new_best
        part_at = parts_ptr + at[:, None] * LATENT + number[None, :]
        tl.store(part_at, out * (page_scale / total)[:, None], mask=is_head)
    # A share without tokens has the sum -inf and a weight of 0 in the merge; its part is never read.
    tl.store(sums_ptr + at, best + tl.log2(total), mask=head < NUM_HEADS)
