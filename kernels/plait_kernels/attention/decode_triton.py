"""Decode attention over pages in Triton: a program takes one row, one key-value head and one split of the row's pages.

The queries of a group fill one tile, so that keys and values are read once. Where rows and heads alone leave the device
idle, every row gets the same number of splits. That number follows from the number of rows, never from their KV
lengths, which are read on the device: a captured step replays at any. Larger batches get splits by their KV lengths
(``split_kv_triton``).

What a row has is read before ``pdl_wait``: the kernel that writes the newest tokens to the pages lets this one start
when all kernels before it have ended (``pdl_wait_first``). Asking for the pages so early as well (a prefetch into L2)
was slower on an H200, by 2 to 10% of these kernels and the GEMMs beside them from 16 rows on.

Shapes: B rows, H query heads, G key-value heads, M = H / G, D dims of a head, P tokens in a page, S splits of a row.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from plait_kernels.kv_cache.reference import PageScales
from plait_kernels.pdl import pdl_launch, pdl_wait

_PROGRAMS_PER_SM = 4
"""Programs to aim for: enough to keep loads in flight while others compute."""
_MAX_SPLITS = 64
_MIN_TILE = 16
"""Rows of the smallest tile for tensor cores."""
LOG2_E = 1.4426950408889634


def decode_paged(
    q_BHD: Tensor,
    pages: Tensor,
    table_BW: Tensor,
    lengths_B: Tensor,
    scale: float,
    out_BHD: Tensor,
    scales: PageScales,
) -> None:
    """See ``plait_kernels.attention.decode_paged``; D and P are powers of two, all tensors contiguous."""
    num_rows, num_heads, head_dim = q_BHD.shape
    num_kv_heads = pages.shape[2]
    num_splits = fixed_num_splits(num_rows * num_kv_heads, q_BHD.device)
    partial = (
        q_BHD.new_empty(num_rows, num_heads, num_splits, head_dim, dtype=torch.float32) if num_splits > 1 else out_BHD
    )
    lse = q_BHD.new_empty(num_rows, num_heads, num_splits, dtype=torch.float32) if num_splits > 1 else out_BHD
    _decode_kernel[(num_rows, num_kv_heads, num_splits)](
        q_BHD,
        pages,
        table_BW,
        lengths_B,
        partial,
        lse,
        scale * scales.k * LOG2_E,
        scales.v,
        table_BW.stride(0),
        NUM_SPLITS=num_splits,
        **tiling(q_BHD, pages),
        **pdl_launch(q_BHD),
    )
    if num_splits > 1:
        _combine_kernel[(num_rows, num_heads)](
            partial, lse, out_BHD, num_heads, NUM_SPLITS=num_splits, HEAD_DIM=head_dim, num_warps=2, **pdl_launch(q_BHD)
        )


def fixed_num_splits(num_programs: int, device: torch.device) -> int:
    """Splits of every row that fill the device; a power of two, as each value is compiled separately."""
    wanted = _PROGRAMS_PER_SM * num_sms(device) // num_programs
    most = min(max(wanted, 1), _MAX_SPLITS)
    return 1 << (most.bit_length() - 1)


def tiling(q_BHD: Tensor, pages: Tensor) -> dict[str, int]:
    """The compile-time sizes of decode kernels; a group's queries fill one tile."""
    num_heads, head_dim = q_BHD.shape[1:]
    num_kv_heads, page_size = pages.shape[2:4]
    group = num_heads // num_kv_heads
    tile = max(_MIN_TILE, triton.next_power_of_2(group))
    sizes = {"NUM_KV_HEADS": num_kv_heads, "GROUP": group, "TILE": tile, "HEAD_DIM": head_dim, "PAGE": page_size}
    return sizes | {"num_warps": 2, "num_stages": 3}


@functools.cache
def num_sms(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@triton.jit
def online_softmax(scores, v, best, total, out):  # type: ignore[no-untyped-def]
    """Takes in more keys and values: returns the largest score so far, the sum of weights, and weighted values."""
    new_best = tl.maximum(best, tl.max(scores, axis=1))
    weights = tl.exp2(scores - new_best[:, None])
    fade = tl.exp2(best - new_best)
    total = total * fade + tl.sum(weights, axis=1)
    out = out * fade[:, None] + tl.dot(weights.to(v.dtype), v)
    return new_best, total, out


@triton.jit
def attend_pages(  # type: ignore[no-untyped-def]
    q,
    pages_ptr,
    table_ptr,
    first,
    last,
    length,
    kv_head,
    scale,
    NUM_KV_HEADS: tl.constexpr,
    TILE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
):
    """A tile of queries over some of a row's pages: the largest score, the sum of weights, and weighted values."""
    dim, token = tl.arange(0, HEAD_DIM), tl.arange(0, PAGE)
    best = tl.full([TILE], -float("inf"), tl.float32)
    total = tl.zeros([TILE], tl.float32)
    out = tl.zeros([TILE, HEAD_DIM], tl.float32)
    inside = token[:, None] * HEAD_DIM + dim[None, :]
    for page in range(first, last):
        page_index = tl.load(table_ptr + page).to(tl.int64)
        begin = (page_index * 2 * NUM_KV_HEADS + kv_head) * PAGE * HEAD_DIM
        # Keys past the row's end are not read: for a short row they are a good part of the page.
        is_seen = page * PAGE + token < length
        k = tl.load(pages_ptr + begin + inside, mask=is_seen[:, None], other=0.0).to(q.dtype)
        v = tl.load(pages_ptr + begin + NUM_KV_HEADS * PAGE * HEAD_DIM + inside, mask=is_seen[:, None], other=0.0).to(
            q.dtype
        )
        scores = tl.dot(q, tl.trans(k)) * scale
        scores = tl.where(is_seen[None, :], scores, -float("inf"))
        best, total, out = online_softmax(scores, v, best, total, out)
    return best, total, out


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=["table_ptr", "lengths_ptr"])
def _decode_kernel(  # type: ignore[no-untyped-def]
    q_ptr,
    pages_ptr,
    table_ptr,
    lengths_ptr,
    partial_ptr,
    lse_ptr,
    scale,
    v_scale,
    table_stride,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):
    row, kv_head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths_ptr + row)
    num_pages = (length + PAGE - 1) // PAGE
    pages_per_split = (num_pages + NUM_SPLITS - 1) // NUM_SPLITS
    first, last = split * pages_per_split, tl.minimum((split + 1) * pages_per_split, num_pages)
    table_ptr += row * table_stride
    pdl_wait(PDL)
    head_in_group, dim = tl.arange(0, TILE), tl.arange(0, HEAD_DIM)
    head = kv_head * GROUP + head_in_group
    is_head = head_in_group < GROUP
    q_at = (row * NUM_KV_HEADS * GROUP + head)[:, None] * HEAD_DIM + dim[None, :]
    q = tl.load(q_ptr + q_at, mask=is_head[:, None], other=0.0)
    best, total, out = attend_pages(
        q, pages_ptr, table_ptr, first, last, length, kv_head, scale, NUM_KV_HEADS, TILE, HEAD_DIM, PAGE
    )
    out *= v_scale
    if NUM_SPLITS == 1:
        tl.store(partial_ptr + q_at, (out / total[:, None]).to(partial_ptr.dtype.element_ty), mask=is_head[:, None])
    else:
        # A split without pages has LSE -inf, so that its weight is 0; its partial result is never read.
        at = (row * NUM_KV_HEADS * GROUP + head) * NUM_SPLITS + split
        tl.store(lse_ptr + at, best + tl.log2(total), mask=is_head)
        if first < last:
            partial_at = at[:, None] * HEAD_DIM + dim[None, :]
            tl.store(partial_ptr + partial_at, out / total[:, None], mask=is_head[:, None])


@triton.jit
def _combine_kernel(  # type: ignore[no-untyped-def]
    partial_ptr, lse_ptr, out_ptr, num_heads, NUM_SPLITS: tl.constexpr, HEAD_DIM: tl.constexpr, PDL: tl.constexpr
):
    pdl_wait(PDL)
    at = tl.program_id(0).to(tl.int64) * num_heads + tl.program_id(1)
    split, dim = tl.arange(0, NUM_SPLITS), tl.arange(0, HEAD_DIM)
    lse = tl.load(lse_ptr + at * NUM_SPLITS + split)
    weights = tl.exp2(lse - tl.max(lse, axis=0))
    partial_at = (at * NUM_SPLITS + split)[:, None] * HEAD_DIM + dim[None, :]
    partial = tl.load(partial_ptr + partial_at, mask=(weights > 0)[:, None], other=0.0)
    out = tl.sum(partial * weights[:, None], axis=0) / tl.sum(weights, axis=0)
    tl.store(out_ptr + at * HEAD_DIM + dim, out.to(out_ptr.dtype.element_ty))
