"""Rope in Triton, with the norm before it and the cache write after it: a program takes some heads of one token.

Shapes: T tokens, H query heads, G key heads, D dims of a head; pages ``[N, 2, G, P, D]``.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from plait_kernels.kv_cache.reference import FP8, UNSCALED, PageScales
from plait_kernels.kv_cache.triton import to_cache_dtype
from plait_kernels.pdl import pdl_launch, pdl_wait_first
from plait_kernels.rope.reference import HeadNorm

_HEADS = 16


def rotate_heads(
    qk_THD: Tensor, num_query_heads: int, cos_T1D: Tensor, sin_T1D: Tensor, norm: HeadNorm | None = None
) -> tuple[Tensor, Tensor]:
    """See ``plait_kernels.rope.rotate_heads``.

    A token's heads are contiguous and D / 2 is a power of two; the norm is not rounded before the rotation.
    """
    num_tokens, num_heads, head_dim = qk_THD.shape
    q_THD = qk_THD.new_empty(num_tokens, num_query_heads, head_dim)
    k_TGD = qk_THD.new_empty(num_tokens, num_heads - num_query_heads, head_dim)
    _launch(qk_THD, (cos_T1D, sin_T1D), norm, (q_THD, k_TGD), None, UNSCALED)
    return q_THD, k_TGD


def rotate_and_store(
    qkv_THD: Tensor,
    num_query_heads: int,
    cos_T1D: Tensor,
    sin_T1D: Tensor,
    norm: HeadNorm | None,
    pages: Tensor,
    slot_mapping_T: Tensor,
    scales: PageScales,
) -> Tensor:
    """See ``plait_kernels.rope.rotate_and_store``; as ``rotate_heads``."""
    q_THD = qkv_THD.new_empty(qkv_THD.shape[0], num_query_heads, qkv_THD.shape[2])
    _launch(qkv_THD, (cos_T1D, sin_T1D), norm, (q_THD, pages), slot_mapping_T, scales)
    return q_THD


def _launch(
    heads_THD: Tensor,
    tables: tuple[Tensor, Tensor],
    norm: HeadNorm | None,
    targets: tuple[Tensor, Tensor],
    slot_mapping_T: Tensor | None,
    scales: PageScales,
) -> None:
    """Writes queries to the first target, keys to the second, and values too if that is pages."""
    num_tokens, num_heads, head_dim = heads_THD.shape
    num_query_heads = targets[0].shape[1]
    if num_tokens == 0:
        return
    _rotate_heads_kernel[(num_tokens, triton.cdiv(num_heads, _HEADS))](
        heads_THD,
        *targets,
        *tables,
        norm.query_D if norm else tables[0],
        norm.key_D if norm else tables[0],
        norm.eps if norm else 0.0,
        tables[0] if slot_mapping_T is None else slot_mapping_T,
        0 if slot_mapping_T is None else targets[1].shape[3],
        1 / scales.k,
        1 / scales.v,
        heads_THD.stride(0),
        num_heads,
        num_query_heads,
        HAS_NORM=norm is not None,
        TO_PAGES=slot_mapping_T is not None,
        IS_FP8=targets[1].dtype == FP8,
        HEADS=_HEADS,
        HALF=head_dim // 2,
        num_warps=2,
        **pdl_launch(heads_THD),
    )


@triton.jit
def _rotate_heads_kernel(  # type: ignore[no-untyped-def]
    heads_ptr,
    q_ptr,
    kv_ptr,
    cos_ptr,
    sin_ptr,
    q_weight_ptr,
    k_weight_ptr,
    eps,
    slot_mapping_ptr,
    page_size,
    k_factor,
    v_factor,
    token_stride,
    num_heads,
    num_query_heads,
    HAS_NORM: tl.constexpr,
    TO_PAGES: tl.constexpr,
    IS_FP8: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl_wait_first(PDL)
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    dim = tl.arange(0, HALF)[None, :]
    is_there = head < num_heads
    is_query = head < num_query_heads
    num_kv_heads = (num_heads - num_query_heads) // 2 if TO_PAGES else num_heads - num_query_heads
    is_key = is_there & (head >= num_query_heads) & (head < num_query_heads + num_kv_heads)
    source = heads_ptr + token * token_stride + head * (2 * HALF) + dim
    raw_a = tl.load(source, mask=is_there, other=0.0)
    raw_b = tl.load(source + HALF, mask=is_there, other=0.0)
    a, b = raw_a.to(tl.float32), raw_b.to(tl.float32)
    if HAS_NORM:
        scale = tl.rsqrt((tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)) / (2 * HALF) + eps)[:, None]
        weight_a = tl.where(is_query, tl.load(q_weight_ptr + dim), tl.load(k_weight_ptr + dim)).to(tl.float32)
        weight_b = tl.where(is_query, tl.load(q_weight_ptr + HALF + dim), tl.load(k_weight_ptr + HALF + dim)).to(
            tl.float32
        )
        a = a * scale * weight_a
        b = b * scale * weight_b
    # The sine table's first half is negated (``rope_tables``); its second is the sine itself.
    cosine = tl.load(cos_ptr + token * (2 * HALF) + dim)
    sine = tl.load(sin_ptr + token * (2 * HALF) + HALF + dim)
    first = (a * cosine - b * sine).to(q_ptr.dtype.element_ty)
    second = (b * cosine + a * sine).to(q_ptr.dtype.element_ty)
    q_target = q_ptr + (token * num_query_heads + head) * (2 * HALF) + dim
    tl.store(q_target, first, mask=is_query)
    tl.store(q_target + HALF, second, mask=is_query)
    if TO_PAGES:
        # A page holds the keys of all heads, then the values. Heads that are neither query nor key are values.
        slot = tl.load(slot_mapping_ptr + token)
        page, offset = slot // page_size, slot % page_size
        kv_head = page * 2 * num_kv_heads + head - num_query_heads
        target = kv_ptr + (kv_head * page_size + offset) * (2 * HALF) + dim
        factor = tl.where(is_key, k_factor, v_factor)
        is_kept = is_there & (head >= num_query_heads)
        tl.store(target, to_cache_dtype(tl.where(is_key, first, raw_a), factor, IS_FP8), mask=is_kept)
        tl.store(target + HALF, to_cache_dtype(tl.where(is_key, second, raw_b), factor, IS_FP8), mask=is_kept)
    else:
        target = kv_ptr + (token * num_kv_heads + head - num_query_heads) * (2 * HALF) + dim
        tl.store(target, first, mask=is_key)
        tl.store(target + HALF, second, mask=is_key)
