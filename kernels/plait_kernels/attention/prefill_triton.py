"""Prefill attention over pages in Triton: a program takes some tokens of a row and the queries of one group.

FP8 elements are upcast as they are read, so that no upcast copy of the KV is kept. A program finds its row and tokens
from the lengths on the device: a captured step replays with any.

Shapes: T tokens, H query heads, G key-value heads, M = H / G, D dims of a head, P tokens in a page, R rows.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from plait_kernels.attention.decode_triton import online_softmax
from plait_kernels.attention.reference import PagedPrefill
from plait_kernels.kv_cache.reference import PageScales
from plait_kernels.pdl import pdl_launch, pdl_wait

_QUERIES = 128
"""Tokens times the heads of a group in a program."""
_ROWS = 32
"""Least rows that the kernel is compiled for: fewer variants to compile while requests wait."""
_LOG2_E = 1.4426950408889634


def prefill_paged(
    q_THD: Tensor, pages: Tensor, rows: PagedPrefill, scale: float, out_THD: Tensor, scales: PageScales
) -> None:
    """See ``plait_kernels.attention.prefill_paged``; D and P are powers of two, a token's heads are contiguous."""
    num_tokens, num_heads, head_dim = q_THD.shape
    num_kv_heads, page_size = pages.shape[2], pages.shape[3]
    group = num_heads // num_kv_heads
    group_heads = triton.next_power_of_2(group)
    tokens = _QUERIES // group_heads
    num_rows = rows.kv_P.shape[0]
    _prefill_kernel[(triton.cdiv(num_tokens, tokens) + num_rows, num_kv_heads)](
        q_THD,
        pages,
        rows.table_PW,
        rows.ends_q,
        rows.kv_P,
        out_THD,
        scale * scales.k * _LOG2_E,
        scales.v,
        rows.table_PW.stride(0),
        q_THD.stride(0),
        out_THD.stride(0),
        num_rows,
        ROWS=max(_ROWS, triton.next_power_of_2(num_rows)),
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        GROUP_HEADS=group_heads,
        TOKENS=tokens,
        HEAD_DIM=head_dim,
        PAGE=page_size,
        num_warps=8,
        num_stages=3,
        **pdl_launch(q_THD),
    )


@triton.jit(do_not_specialize=["table_stride", "num_rows"])
def _prefill_kernel(  # type: ignore[no-untyped-def]
    q_ptr,
    pages_ptr,
    table_ptr,
    ends_ptr,
    kv_ptr,
    out_ptr,
    scale,
    v_scale,
    table_stride,
    q_stride,
    out_stride,
    num_rows,
    ROWS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl_wait(PDL)
    each = tl.arange(0, ROWS)
    lengths = tl.load(ends_ptr + each + 1, mask=each < num_rows, other=0) - tl.load(
        ends_ptr + each, mask=each < num_rows, other=0
    )
    tiles = tl.cumsum((lengths + TOKENS - 1) // TOKENS, axis=0)
    row = tl.sum(((tiles <= tl.program_id(0)) & (each < num_rows)).to(tl.int32), axis=0)
    if row >= num_rows:
        return
    tile = tl.program_id(0) - tl.max(tl.where(tiles <= tl.program_id(0), tiles, 0), axis=0)
    begin = tl.load(ends_ptr + row)
    length = tl.load(ends_ptr + row + 1) - begin
    num_seen = tl.load(kv_ptr + row)
    context = num_seen - length
    kv_head = tl.program_id(1)
    query, dim, offset = tl.arange(0, TOKENS * GROUP_HEADS), tl.arange(0, HEAD_DIM), tl.arange(0, PAGE)
    token, head_in_group = tile * TOKENS + query // GROUP_HEADS, query % GROUP_HEADS
    is_query = (token < length) & (head_in_group < GROUP)
    head = kv_head * GROUP + head_in_group
    at = (begin + token).to(tl.int64)
    q_at = (at * q_stride + head * HEAD_DIM)[:, None] + dim[None, :]
    q = tl.load(q_ptr + q_at, mask=is_query[:, None], other=0.0)
    best = tl.full([TOKENS * GROUP_HEADS], -float("inf"), tl.float32)
    total = tl.zeros([TOKENS * GROUP_HEADS], tl.float32)
    out = tl.zeros([TOKENS * GROUP_HEADS, HEAD_DIM], tl.float32)
    inside = offset[:, None] * HEAD_DIM + dim[None, :]
    table = table_ptr + row.to(tl.int64) * table_stride
    last = tl.minimum(num_seen, context + (tile + 1) * TOKENS)
    for page in range(0, (last + PAGE - 1) // PAGE):
        first = (tl.load(table + page).to(tl.int64) * 2 * NUM_KV_HEADS + kv_head) * PAGE * HEAD_DIM
        position = page * PAGE + offset
        is_there = (position < last)[:, None]
        k = tl.load(pages_ptr + first + inside, mask=is_there, other=0.0).to(q.dtype)
        v = tl.load(pages_ptr + first + NUM_KV_HEADS * PAGE * HEAD_DIM + inside, mask=is_there, other=0.0).to(q.dtype)
        scores = tl.dot(q, tl.trans(k)) * scale
        is_seen = position[None, :] <= (context + token)[:, None]
        scores = tl.where(is_seen, scores, -float("inf"))
        # Every query sees a position of the first page, so that inf - inf does not occur.
        best, total, out = online_softmax(scores, v, best, total, out)
    out_at = (at * out_stride + head * HEAD_DIM)[:, None] + dim[None, :]
    out = out * (v_scale / total)[:, None]
    tl.store(out_ptr + out_at, out.to(out_ptr.dtype.element_ty), mask=is_query[:, None])
