"""Rope in Triton: norm and rotation of some heads of one token a program.

Shapes: T tokens, H query heads, G key heads, D numbers in a head.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from plait_kernels.rope.reference import HeadNorm

_HEADS = 16


def rotate_heads(
    qk_THD: Tensor, num_query_heads: int, cos_T1D: Tensor, sin_T1D: Tensor, norm: HeadNorm | None = None
) -> tuple[Tensor, Tensor]:
    """See ``plait_kernels.rope.rotate_heads``.

    Heads of a token lie one after the other and D / 2 is a power of two; the norm is not rounded before the rotation.
    """
    num_tokens, num_heads, head_dim = qk_THD.shape
    q_THD = qk_THD.new_empty(num_tokens, num_query_heads, head_dim)
    k_TGD = qk_THD.new_empty(num_tokens, num_heads - num_query_heads, head_dim)
    if num_tokens:
        _rotate_heads[(num_tokens, triton.cdiv(num_heads, _HEADS))](
            qk_THD,
            q_THD,
            k_TGD,
            cos_T1D,
            sin_T1D,
            norm.query_D if norm else cos_T1D,
            norm.key_D if norm else cos_T1D,
            norm.eps if norm else 0.0,
            qk_THD.stride(0),
            num_heads,
            num_query_heads,
            HAS_NORM=norm is not None,
            HEADS=_HEADS,
            HALF=head_dim // 2,
            num_warps=2,
        )
    return q_THD, k_TGD


@triton.jit
def _rotate_heads(  # type: ignore[no-untyped-def]
    qk_ptr,
    q_ptr,
    k_ptr,
    cos_ptr,
    sin_ptr,
    q_weight_ptr,
    k_weight_ptr,
    eps,
    token_stride,
    num_heads,
    num_query_heads,
    HAS_NORM: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    number = tl.arange(0, HALF)[None, :]
    is_there = head < num_heads
    is_query = head < num_query_heads
    source = qk_ptr + token * token_stride + head * (2 * HALF) + number
    a = tl.load(source, mask=is_there, other=0.0).to(tl.float32)
    b = tl.load(source + HALF, mask=is_there, other=0.0).to(tl.float32)
    if HAS_NORM:
        scale = tl.rsqrt((tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)) / (2 * HALF) + eps)[:, None]
        weight_a = tl.where(is_query, tl.load(q_weight_ptr + number), tl.load(k_weight_ptr + number)).to(tl.float32)
        weight_b = tl.where(is_query, tl.load(q_weight_ptr + HALF + number), tl.load(k_weight_ptr + HALF + number)).to(
            tl.float32
        )
        a = a * scale * weight_a
        b = b * scale * weight_b
    # The sine table's first half is negated (``rope_tables``); its second is the sine itself.
    cosine = tl.load(cos_ptr + token * (2 * HALF) + number)
    sine = tl.load(sin_ptr + token * (2 * HALF) + HALF + number)
    first = (a * cosine - b * sine).to(q_ptr.dtype.element_ty)
    second = (b * cosine + a * sine).to(q_ptr.dtype.element_ty)
    q_target = q_ptr + (token * num_query_heads + head) * (2 * HALF) + number
    tl.store(q_target, first, mask=is_query)
    tl.store(q_target + HALF, second, mask=is_query)
    k_target = k_ptr + (token * (num_heads - num_query_heads) + head - num_query_heads) * (2 * HALF) + number
    is_key = is_there & (head >= num_query_heads)
    tl.store(k_target, first, mask=is_key)
    tl.store(k_target + HALF, second, mask=is_key)
