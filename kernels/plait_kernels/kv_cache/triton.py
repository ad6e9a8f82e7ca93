"""Cache writes in Triton: a program takes one token's keys and values.

Shapes: T tokens, G key-value heads, D dims of a head, N pages of P tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from plait_kernels.kv_cache.reference import FP8, PageScales
from plait_kernels.pdl import pdl_launch, pdl_wait_first


def store(k_TGD: Tensor, v_TGD: Tensor, pages: Tensor, slot_mapping_T: Tensor, scales: PageScales) -> None:
    """See ``plait_kernels.kv_cache.store``; a head's dims are contiguous, heads need not be."""
    num_tokens, num_heads, head_dim = k_TGD.shape
    if num_tokens == 0:
        return
    _store_kernel[(num_tokens,)](
        k_TGD,
        v_TGD,
        pages,
        slot_mapping_T,
        k_TGD.stride(0),
        k_TGD.stride(1),
        v_TGD.stride(0),
        v_TGD.stride(1),
        pages.shape[3],
        1 / scales.k,
        1 / scales.v,
        IS_FP8=pages.dtype == FP8,
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        BLOCK=triton.next_power_of_2(num_heads * head_dim),
        **pdl_launch(pages),
    )


@triton.jit
def _store_kernel(  # type: ignore[no-untyped-def]
    k_ptr,
    v_ptr,
    pages_ptr,
    slot_mapping_ptr,
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    page_size,
    k_factor,
    v_factor,
    IS_FP8: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl_wait_first(PDL)
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token)
    index = tl.arange(0, BLOCK)
    is_there = index < NUM_HEADS * HEAD_DIM
    head, dim = index // HEAD_DIM, index % HEAD_DIM
    k = tl.load(k_ptr + token * k_token_stride + head * k_head_stride + dim, mask=is_there)
    v = tl.load(v_ptr + token * v_token_stride + head * v_head_stride + dim, mask=is_there)
    half = NUM_HEADS * page_size * HEAD_DIM
    first = (slot // page_size) * 2 * half + (slot % page_size) * HEAD_DIM
    target = pages_ptr + first + head * page_size * HEAD_DIM + dim
    tl.store(target, to_cache_dtype(k, k_factor, IS_FP8), mask=is_there)
    tl.store(target + half, to_cache_dtype(v, v_factor, IS_FP8), mask=is_there)


@triton.jit
def to_cache_dtype(values, factor, IS_FP8: tl.constexpr):  # type: ignore[no-untyped-def]
    """The values as the pages store them."""
    return tl.clamp(values.to(tl.float32) * factor, -448.0, 448.0).to(tl.float8e4nv) if IS_FP8 else values
