"""Latents in Triton: queries absorb their matrix, and what is cached reaches its page, in one launch.

Of ``absorb_and_store``, programs of the first kind take some rows of one head and a share of the latent's numbers;
those of the second kind one token's latent, as in ``store_and_turn``, where others turn some heads of one token. Shapes
as in ``plait_kernels.latent``.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from plait_kernels.kv_cache.triton import rounded
from plait_kernels.latent.reference import AbsorbedQueries, CacheTarget, LatentNorm, Tables
from plait_kernels.pdl import pdl_launch

_FEW_ROWS, _MANY_ROWS = 16, 64
_LATENT_SHARE = 128
_HEADS = 16


def store_and_turn(
    cached_TC: Tensor, q_PHE: Tensor, norm: LatentNorm, tables: Tables, cache: CacheTarget
) -> tuple[Tensor, Tensor]:
    """See ``plait_kernels.latent.store_and_turn``."""
    latent_TC = cached_TC.new_empty(cached_TC.shape)
    width, (num_turned, num_heads, query_dim) = norm.weight_L.shape[0], q_PHE.shape
    if len(cached_TC):
        _store_and_turn[(len(cached_TC), 1 + triton.cdiv(num_heads, _HEADS))](
            cached_TC,
            norm.weight_L,
            *tables,
            cache.pages,
            cache.slot_mapping_T,
            latent_TC,
            q_PHE,
            norm.eps,
            1 / cache.scale,
            cached_TC.stride(0),
            q_PHE.stride(0),
            q_PHE.stride(1),
            num_turned,
            num_heads,
            query_dim - tables.width,
            WIDTH=width,
            BLOCK=triton.next_power_of_2(width),
            HALF=tables.width // 2,
            HEADS=_HEADS,
            num_warps=4,
            **pdl_launch(cached_TC),
        )
    return latent_TC, q_PHE


def absorb(q_BHE: Tensor, key_HOL: Tensor, tables: Tables) -> Tensor:
    """See ``plait_kernels.latent.absorb``."""
    # Nothing is stored: the arguments of that part are never read.
    nothing = (q_BHE[:, 0], LatentNorm(key_HOL, 0.0), tables, CacheTarget(q_BHE, tables.cos_T1R))
    return _enter(AbsorbedQueries(q_BHE, key_HOL), *nothing, is_stored=False)


def absorb_and_store(
    queries: AbsorbedQueries, cached_TC: Tensor, norm: LatentNorm, tables: Tables, cache: CacheTarget
) -> Tensor:
    """See ``plait_kernels.latent.absorb_and_store``."""
    return _enter(queries, cached_TC, norm, tables, cache, is_stored=True)


def _enter(
    queries: AbsorbedQueries,
    cached_BC: Tensor,
    norm: LatentNorm,
    tables: Tables,
    cache: CacheTarget,
    *,
    is_stored: bool,
) -> Tensor:
    q_BHE, key_HOL = queries
    num_rows, num_heads, _ = q_BHE.shape
    _, num_still, width = key_HOL.shape
    q_BHC = q_BHE.new_empty(num_rows, num_heads, width + tables.width)
    if num_rows == 0:
        return q_BHC
    tile = _FEW_ROWS if num_rows <= 2 * _FEW_ROWS else _MANY_ROWS
    share = min(_LATENT_SHARE, triton.next_power_of_2(width))
    num_shares = triton.cdiv(width, share)
    num_absorbing = num_heads * num_shares
    _absorb_and_store[(num_absorbing + is_stored * tile, triton.cdiv(num_rows, tile))](
        q_BHE,
        key_HOL,
        *tables,
        q_BHC,
        cached_BC,
        norm.weight_L,
        cache.pages,
        cache.slot_mapping_T,
        norm.eps,
        1 / cache.scale,
        num_rows,
        num_absorbing,
        q_BHE.stride(0),
        q_BHE.stride(1),
        key_HOL.stride(0),
        key_HOL.stride(1),
        cached_BC.stride(0),
        NUM_HEADS=num_heads,
        NUM_STILL=num_still,
        STILL=max(_FEW_ROWS, triton.next_power_of_2(num_still)),
        WIDTH=width,
        BLOCK=triton.next_power_of_2(width),
        SHARE=max(_FEW_ROWS, share),
        NUM_SHARES=num_shares,
        HALF=tables.width // 2,
        TILE=tile,
        IS_STORED=is_stored,
        num_warps=4,
        **pdl_launch(q_BHE),
    )
    return q_BHC


@triton.jit
def _wait(PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    """For the kernel before this one. The next is not let in early: FlashMLA's would not wait for what it reads."""
    if PDL:
        gdc_wait()


@triton.jit(do_not_specialize=["num_rows"])
def _absorb_and_store(  # type: ignore[no-untyped-def]
    q_ptr,
    key_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    cached_ptr,
    weight_ptr,
    pages_ptr,
    slot_mapping_ptr,
    eps,
    factor,
    num_rows,
    num_absorbing,
    q_row_stride,
    q_head_stride,
    key_head_stride,
    key_row_stride,
    cached_stride,
    NUM_HEADS: tl.constexpr,
    NUM_STILL: tl.constexpr,
    STILL: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    SHARE: tl.constexpr,
    NUM_SHARES: tl.constexpr,
    HALF: tl.constexpr,
    TILE: tl.constexpr,
    IS_STORED: tl.constexpr,
    PDL: tl.constexpr,
):
    program, first = tl.program_id(0), tl.program_id(1) * TILE
    if program < num_absorbing:
        head, share = program // NUM_SHARES, program % NUM_SHARES
        row = first + tl.arange(0, TILE)
        is_row = row < num_rows
        still, number = tl.arange(0, STILL), share * SHARE + tl.arange(0, SHARE)
        q_at = q_ptr + row.to(tl.int64)[:, None] * q_row_stride + head * q_head_stride
        key_at = key_ptr + head.to(tl.int64) * key_head_stride + still[:, None] * key_row_stride + number[None, :]
        is_key = (still < NUM_STILL)[:, None] & (number < WIDTH)[None, :]
        key = tl.load(key_at, mask=is_key, other=0.0)
        _wait(PDL)  # the matrix is nobody's output
        q = tl.load(q_at + still[None, :], mask=is_row[:, None] & (still < NUM_STILL)[None, :], other=0.0)
        absorbed = tl.dot(q, key, input_precision="ieee")
        out_at = out_ptr + (row.to(tl.int64) * NUM_HEADS + head)[:, None] * (WIDTH + 2 * HALF)
        is_out = is_row[:, None] & (number < WIDTH)[None, :]
        tl.store(out_at + number[None, :], absorbed.to(out_ptr.dtype.element_ty), mask=is_out)
        if share == 0:
            _turn_rows(q_at + NUM_STILL, cos_ptr, sin_ptr, out_at + WIDTH, row[:, None], is_row[:, None], HALF)
    elif IS_STORED:
        _wait(PDL)
        token = first + program - num_absorbing
        if token < num_rows:
            source, target = (
                (cached_ptr, cached_stride, weight_ptr, eps),
                (pages_ptr, slot_mapping_ptr, factor, cached_ptr),
            )
            _store_token(token.to(tl.int64), source, cos_ptr, sin_ptr, target, WIDTH, BLOCK, HALF, False)


@triton.jit(do_not_specialize=["num_turned"])
def _store_and_turn(  # type: ignore[no-untyped-def]
    cached_ptr,
    weight_ptr,
    cos_ptr,
    sin_ptr,
    pages_ptr,
    slot_mapping_ptr,
    copy_ptr,
    q_ptr,
    eps,
    factor,
    cached_stride,
    q_token_stride,
    q_head_stride,
    num_turned,
    num_heads,
    num_still,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    PDL: tl.constexpr,
):
    token, share = tl.program_id(0).to(tl.int64), tl.program_id(1)
    _wait(PDL)
    if share == 0:
        source, target = (cached_ptr, cached_stride, weight_ptr, eps), (pages_ptr, slot_mapping_ptr, factor, copy_ptr)
        _store_token(token, source, cos_ptr, sin_ptr, target, WIDTH, BLOCK, HALF, True)
    elif token < num_turned:
        head = ((share - 1) * HEADS + tl.arange(0, HEADS))[:, None]
        q_at = q_ptr + token * q_token_stride + head * q_head_stride + num_still
        _turn_rows(q_at, cos_ptr, sin_ptr, q_at, token, head < num_heads, HALF)


@triton.jit
def _store_token(  # type: ignore[no-untyped-def]
    token,
    source,
    cos_ptr,
    sin_ptr,
    target,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    HALF: tl.constexpr,
    HAS_COPY: tl.constexpr,
):
    cached_ptr, cached_stride, weight_ptr, eps = source
    pages_ptr, slot_mapping_ptr, factor, copy_ptr = target
    kind = cached_ptr.dtype.element_ty
    IS_FP8: tl.constexpr = pages_ptr.dtype.element_ty == tl.float8e4nv
    number = tl.arange(0, BLOCK)
    is_there = number < WIDTH
    cached_at = cached_ptr + token * cached_stride
    latent = tl.load(cached_at + number, mask=is_there, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + number, mask=is_there, other=0.0).to(tl.float32)
    normed = (latent * tl.rsqrt(tl.sum(latent * latent, axis=0) / WIDTH + eps) * weight).to(kind)
    half = tl.arange(0, HALF)
    a = tl.load(cached_at + WIDTH + half).to(tl.float32)
    b = tl.load(cached_at + WIDTH + HALF + half).to(tl.float32)
    cosine = tl.load(cos_ptr + token * (2 * HALF) + half)
    sine = tl.load(sin_ptr + token * (2 * HALF) + HALF + half)
    first, second = (a * cosine - b * sine).to(kind), (b * cosine + a * sine).to(kind)
    page_at = pages_ptr + tl.load(slot_mapping_ptr + token) * (WIDTH + 2 * HALF)
    tl.store(page_at + number, rounded(normed, factor, IS_FP8), mask=is_there)
    tl.store(page_at + WIDTH + half, rounded(first, factor, IS_FP8))
    tl.store(page_at + WIDTH + HALF + half, rounded(second, factor, IS_FP8))
    if HAS_COPY:
        copy = copy_ptr + token * (WIDTH + 2 * HALF)
        tl.store(copy + number, normed, mask=is_there)
        tl.store(copy + WIDTH + half, first)
        tl.store(copy + WIDTH + HALF + half, second)


@triton.jit
def _turn_rows(source, cos_ptr, sin_ptr, target, token, is_there, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
    """Turns the numbers at ``source`` by their token's angles; all are columns but for a single token."""
    number = tl.arange(0, HALF)[None, :]
    a = tl.load(source + number, mask=is_there, other=0.0).to(tl.float32)
    b = tl.load(source + HALF + number, mask=is_there, other=0.0).to(tl.float32)
    cosine = tl.load(cos_ptr + token * (2 * HALF) + number, mask=is_there, other=0.0)
    # The sine table's first half is negated (``rope_tables``); its second is the sine itself.
    sine = tl.load(sin_ptr + token * (2 * HALF) + HALF + number, mask=is_there, other=0.0)
    kind = target.dtype.element_ty
    tl.store(target + number, (a * cosine - b * sine).to(kind), mask=is_there)
    tl.store(target + HALF + number, (b * cosine + a * sine).to(kind), mask=is_there)
