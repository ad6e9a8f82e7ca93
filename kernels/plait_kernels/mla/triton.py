"""MLA in Triton: weight absorption, rope and the cache write in one launch.

``absorb_and_cache`` has two kinds of programs: some absorb some rows of one head into a slice of the latent's dims,
others write one token's cache entry. In ``rope_and_cache`` the first program of a token writes its entry, the others
rotate some heads of its query. Shapes as in ``plait_kernels.mla``.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from plait_kernels.kv_cache.triton import to_cache_dtype
from plait_kernels.mla.reference import AbsorbedQueries, CacheTarget, MlaNorm, Tables
from plait_kernels.pdl import pdl_launch, pdl_wait_first

_FEW_ROWS, _MANY_ROWS = 16, 64
_LATENT_SPLIT = 128
_HEADS = 16


def rope_and_cache(
    cached_TC: Tensor, q_PHE: Tensor, norm: MlaNorm, tables: Tables, cache: CacheTarget
) -> tuple[Tensor, Tensor]:
    """See ``plait_kernels.mla.rope_and_cache``."""
    latent_TC = cached_TC.new_empty(cached_TC.shape)
    width, (num_rotated, num_heads, query_dim) = norm.weight_L.shape[0], q_PHE.shape
    if len(cached_TC):
        _rope_and_cache_kernel[(len(cached_TC), 1 + triton.cdiv(num_heads, _HEADS))](
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
            num_rotated,
            num_heads,
            query_dim - tables.rotary_dim,
            WIDTH=width,
            BLOCK=triton.next_power_of_2(width),
            HALF=tables.rotary_dim // 2,
            HEADS=_HEADS,
            num_warps=4,
            **pdl_launch(cached_TC),
        )
    return latent_TC, q_PHE


def absorb(q_BHE: Tensor, key_HOL: Tensor, tables: Tables, next_waits: bool) -> Tensor:
    """See ``plait_kernels.mla.absorb``."""
    # Nothing is cached: the arguments of the cache write are never read.
    nothing = (q_BHE[:, 0], MlaNorm(key_HOL, 0.0), tables, CacheTarget(q_BHE, tables.cos_T1R))
    return _launch(AbsorbedQueries(q_BHE, key_HOL), *nothing, has_cache=False, next_waits=next_waits)


def absorb_and_cache(
    queries: AbsorbedQueries, cached_TC: Tensor, norm: MlaNorm, tables: Tables, cache: CacheTarget, next_waits: bool
) -> Tensor:
    """See ``plait_kernels.mla.absorb_and_cache``."""
    return _launch(queries, cached_TC, norm, tables, cache, has_cache=True, next_waits=next_waits)


def _launch(
    queries: AbsorbedQueries,
    cached_BC: Tensor,
    norm: MlaNorm,
    tables: Tables,
    cache: CacheTarget,
    *,
    has_cache: bool,
    next_waits: bool,
) -> Tensor:
    q_BHE, key_HOL = queries
    num_rows, num_heads, _ = q_BHE.shape
    _, nope_dim, width = key_HOL.shape
    q_BHC = q_BHE.new_empty(num_rows, num_heads, width + tables.rotary_dim)
    if num_rows == 0:
        return q_BHC
    tile = _FEW_ROWS if num_rows <= 2 * _FEW_ROWS else _MANY_ROWS
    split = min(_LATENT_SPLIT, triton.next_power_of_2(width))
    num_splits = triton.cdiv(width, split)
    num_absorb_programs = num_heads * num_splits
    _absorb_and_cache_kernel[(num_absorb_programs + has_cache * tile, triton.cdiv(num_rows, tile))](
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
        num_absorb_programs,
        q_BHE.stride(0),
        q_BHE.stride(1),
        key_HOL.stride(0),
        key_HOL.stride(1),
        cached_BC.stride(0),
        NUM_HEADS=num_heads,
        NOPE_DIM=nope_dim,
        NOPE_BLOCK=max(_FEW_ROWS, triton.next_power_of_2(nope_dim)),
        WIDTH=width,
        BLOCK=triton.next_power_of_2(width),
        SPLIT=max(_FEW_ROWS, split),
        NUM_SPLITS=num_splits,
        HALF=tables.rotary_dim // 2,
        TILE=tile,
        HAS_CACHE=has_cache,
        NEXT_WAITS=next_waits,
        num_warps=4,
        **pdl_launch(q_BHE),
    )
    return q_BHC


@triton.jit
def _pdl_wait(PDL: tl.constexpr, NEXT_WAITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Wait for the kernel before this one. The next one starts late if it does not wait, as FlashMLA's."""
    if NEXT_WAITS:
        pdl_wait_first(PDL)
    elif PDL:
        gdc_wait()


@triton.jit(do_not_specialize=["num_rows"])
def _absorb_and_cache_kernel(  # type: ignore[no-untyped-def]
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
    num_absorb_programs,
    q_row_stride,
    q_head_stride,
    key_head_stride,
    key_row_stride,
    cached_stride,
    NUM_HEADS: tl.constexpr,
    NOPE_DIM: tl.constexpr,
    NOPE_BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    HALF: tl.constexpr,
    TILE: tl.constexpr,
    HAS_CACHE: tl.constexpr,
    NEXT_WAITS: tl.constexpr,
    PDL: tl.constexpr,
):
    program, first = tl.program_id(0), tl.program_id(1) * TILE
    if program < num_absorb_programs:
        head, split = program // NUM_SPLITS, program % NUM_SPLITS
        row = first + tl.arange(0, TILE)
        is_row = row < num_rows
        nope, dim = tl.arange(0, NOPE_BLOCK), split * SPLIT + tl.arange(0, SPLIT)
        q_at = q_ptr + row.to(tl.int64)[:, None] * q_row_stride + head * q_head_stride
        key_at = key_ptr + head.to(tl.int64) * key_head_stride + nope[:, None] * key_row_stride + dim[None, :]
        is_key = (nope < NOPE_DIM)[:, None] & (dim < WIDTH)[None, :]
        key = tl.load(key_at, mask=is_key, other=0.0)
        _pdl_wait(PDL, NEXT_WAITS)  # no kernel writes the weights
        q = tl.load(q_at + nope[None, :], mask=is_row[:, None] & (nope < NOPE_DIM)[None, :], other=0.0)
        absorbed = tl.dot(q, key, input_precision="ieee")
        out_at = out_ptr + (row.to(tl.int64) * NUM_HEADS + head)[:, None] * (WIDTH + 2 * HALF)
        is_out = is_row[:, None] & (dim < WIDTH)[None, :]
        tl.store(out_at + dim[None, :], absorbed.to(out_ptr.dtype.element_ty), mask=is_out)
        if split == 0:
            _rotate_rows(q_at + NOPE_DIM, cos_ptr, sin_ptr, out_at + WIDTH, row[:, None], is_row[:, None], HALF)
    elif HAS_CACHE:
        _pdl_wait(PDL, NEXT_WAITS)
        token = first + program - num_absorb_programs
        if token < num_rows:
            source, target = (
                (cached_ptr, cached_stride, weight_ptr, eps),
                (pages_ptr, slot_mapping_ptr, factor, cached_ptr),
            )
            _store_token(token.to(tl.int64), source, cos_ptr, sin_ptr, target, WIDTH, BLOCK, HALF, False)


@triton.jit(do_not_specialize=["num_rotated"])
def _rope_and_cache_kernel(  # type: ignore[no-untyped-def]
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
    num_rotated,
    num_heads,
    nope_dim,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    PDL: tl.constexpr,
):
    token, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    _pdl_wait(PDL, False)
    if split == 0:
        source, target = (cached_ptr, cached_stride, weight_ptr, eps), (pages_ptr, slot_mapping_ptr, factor, copy_ptr)
        _store_token(token, source, cos_ptr, sin_ptr, target, WIDTH, BLOCK, HALF, True)
    elif token < num_rotated:
        head = ((split - 1) * HEADS + tl.arange(0, HEADS))[:, None]
        q_at = q_ptr + token * q_token_stride + head * q_head_stride + nope_dim
        _rotate_rows(q_at, cos_ptr, sin_ptr, q_at, token, head < num_heads, HALF)


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
    dim = tl.arange(0, BLOCK)
    is_there = dim < WIDTH
    cached_at = cached_ptr + token * cached_stride
    latent = tl.load(cached_at + dim, mask=is_there, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + dim, mask=is_there, other=0.0).to(tl.float32)
    normed = (latent * tl.rsqrt(tl.sum(latent * latent, axis=0) / WIDTH + eps) * weight).to(kind)
    half = tl.arange(0, HALF)
    a = tl.load(cached_at + WIDTH + half).to(tl.float32)
    b = tl.load(cached_at + WIDTH + HALF + half).to(tl.float32)
    cosine = tl.load(cos_ptr + token * (2 * HALF) + half)
    sine = tl.load(sin_ptr + token * (2 * HALF) + HALF + half)
    first, second = (a * cosine - b * sine).to(kind), (b * cosine + a * sine).to(kind)
    page_at = pages_ptr + tl.load(slot_mapping_ptr + token) * (WIDTH + 2 * HALF)
    tl.store(page_at + dim, to_cache_dtype(normed, factor, IS_FP8), mask=is_there)
    tl.store(page_at + WIDTH + half, to_cache_dtype(first, factor, IS_FP8))
    tl.store(page_at + WIDTH + HALF + half, to_cache_dtype(second, factor, IS_FP8))
    if HAS_COPY:
        copy = copy_ptr + token * (WIDTH + 2 * HALF)
        tl.store(copy + dim, normed, mask=is_there)
        tl.store(copy + WIDTH + half, first)
        tl.store(copy + WIDTH + HALF + half, second)


@triton.jit
def _rotate_rows(source, cos_ptr, sin_ptr, target, token, is_there, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rotate the dims at ``source`` by their token's angles; all arguments are columns, or one token's."""
    dim = tl.arange(0, HALF)[None, :]
    a = tl.load(source + dim, mask=is_there, other=0.0).to(tl.float32)
    b = tl.load(source + HALF + dim, mask=is_there, other=0.0).to(tl.float32)
    cosine = tl.load(cos_ptr + token * (2 * HALF) + dim, mask=is_there, other=0.0)
    # The sine table's first half is negated (``rope_tables``); its second is the sine itself.
    sine = tl.load(sin_ptr + token * (2 * HALF) + HALF + dim, mask=is_there, other=0.0)
    kind = target.dtype.element_ty
    tl.store(target + dim, (a * cosine - b * sine).to(kind), mask=is_there)
    tl.store(target + HALF + dim, (b * cosine + a * sine).to(kind), mask=is_there)
