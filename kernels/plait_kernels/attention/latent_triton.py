"""Absorbed queries over pages of latents in Triton: a program takes one token, some heads and a share of its pages.

The latents are key and value of one head that all query heads share, so that they are read once for a tile of heads.
A token is divided among several programs where tokens and heads alone leave the device idle; how many is fixed by
their number, never by the lengths, which are read on the device: a captured step replays at any depth.

Shapes: A absorbed tokens, H heads, L numbers in a latent, R in the key that all heads share, C = L + R, P tokens in a
page, S shares of a token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from plait_kernels.attention.triton import num_shares

_LOG2_E = 1.4426950408889634
_HEADS = 16
_TOKENS = 32


def decode_latents(
    q_AHC: Tensor, pages: Tensor, table_AW: Tensor, lengths_A: Tensor, scale: float, out_AHL: Tensor
) -> None:
    """See ``plait_kernels.attention.decode_latents``; L and R are powers of two, P a multiple of 32, all contiguous."""
    num_tokens, num_heads, width = q_AHC.shape
    latent = out_AHL.shape[2]
    tiles = triton.cdiv(num_heads, _HEADS)
    shares = num_shares(num_tokens * tiles, q_AHC.device)
    parts = q_AHC.new_empty(num_tokens, num_heads, shares, latent, dtype=torch.float32) if shares > 1 else out_AHL
    sums = q_AHC.new_empty(num_tokens, num_heads, shares, dtype=torch.float32) if shares > 1 else out_AHL
    _decode_latents[(num_tokens, tiles, shares)](
        q_AHC,
        pages,
        table_AW,
        lengths_A,
        parts,
        sums,
        scale * _LOG2_E,
        table_AW.stride(0),
        NUM_HEADS=num_heads,
        HEADS=_HEADS,
        LATENT=latent,
        SHARED=width - latent,
        PAGE=pages.shape[1],
        TOKENS=_TOKENS,
        SHARES=shares,
        num_warps=4,
        num_stages=2,
    )
    if shares > 1:
        _merge_latents[(num_tokens, num_heads)](
            parts, sums, out_AHL, num_heads, SHARES=shares, LATENT=latent, num_warps=4
        )


@triton.jit(do_not_specialize=["table_stride"])
def _decode_latents(  # type: ignore[no-untyped-def]
    q_ptr,
    pages_ptr,
    table_ptr,
    lengths_ptr,
    parts_ptr,
    sums_ptr,
    scale,
    table_stride,
    NUM_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    SHARED: tl.constexpr,
    PAGE: tl.constexpr,
    TOKENS: tl.constexpr,
    SHARES: tl.constexpr,
):
    row, share = tl.program_id(0).to(tl.int64), tl.program_id(2)
    length = tl.load(lengths_ptr + row)
    num_tiles = (length + TOKENS - 1) // TOKENS
    per_share = (num_tiles + SHARES - 1) // SHARES
    first, last = share * per_share, tl.minimum((share + 1) * per_share, num_tiles)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    is_head = (head < NUM_HEADS)[:, None]
    number, shared, token = tl.arange(0, LATENT), tl.arange(0, SHARED), tl.arange(0, TOKENS)
    q_at = q_ptr + (row * NUM_HEADS + head)[:, None] * (LATENT + SHARED)
    q = tl.load(q_at + number[None, :], mask=is_head, other=0.0)
    q_shared = tl.load(q_at + LATENT + shared[None, :], mask=is_head, other=0.0)
    best = tl.full([HEADS], -float("inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    out = tl.zeros([HEADS, LATENT], tl.float32)
    for tile in range(first, last):
        position = tile * TOKENS
        page = tl.load(table_ptr + row * table_stride + position // PAGE).to(tl.int64)
        begin = pages_ptr + (page * PAGE + position % PAGE + token)[:, None] * (LATENT + SHARED)
        latent = tl.load(begin + number[None, :])
        scores = tl.dot(q, tl.trans(latent))
        scores = tl.dot(q_shared, tl.trans(tl.load(begin + LATENT + shared[None, :])), scores) * scale
        scores = tl.where((position + token < length)[None, :], scores, -float("inf"))
        new_best = tl.maximum(best, tl.max(scores, axis=1))
        weights = tl.exp2(scores - new_best[:, None])
        fade = tl.exp2(best - new_best)
        total = total * fade + tl.sum(weights, axis=1)
        out = out * fade[:, None] + tl.dot(weights.to(latent.dtype), latent)
        best = new_best
    at = row * NUM_HEADS + head
    if SHARES == 1:
        result = (out / total[:, None]).to(parts_ptr.dtype.element_ty)
        tl.store(parts_ptr + at[:, None] * LATENT + number[None, :], result, mask=is_head)
    else:
        # A share without tokens has the sum -inf and a weight of 0 in the merge; its part is never read.
        at = at * SHARES + share
        tl.store(sums_ptr + at, best + tl.log2(total), mask=head < NUM_HEADS)
        if first < last:
            tl.store(parts_ptr + at[:, None] * LATENT + number[None, :], out / total[:, None], mask=is_head)


@triton.jit
def _merge_latents(parts_ptr, sums_ptr, out_ptr, num_heads, SHARES: tl.constexpr, LATENT: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * num_heads + tl.program_id(1)
    share, number = tl.arange(0, SHARES), tl.arange(0, LATENT)
    sums = tl.load(sums_ptr + at * SHARES + share)
    best = tl.max(sums, axis=0)
    total = tl.sum(tl.exp2(sums - best), axis=0)
    out = tl.zeros([LATENT], tl.float32)
    for index in range(SHARES):
        weight = tl.exp2(tl.load(sums_ptr + at * SHARES + index) - best) / total
        if weight > 0:
            out += tl.load(parts_ptr + (at * SHARES + index) * LATENT + number) * weight
    tl.store(out_ptr + at * LATENT + number, out.to(out_ptr.dtype.element_ty))
