"""Decode rows over pages in Triton, each divided by its depth: one deep row among short ones holds nothing up.

A launch of one kernel, once a step, divides the rows on the device, where a captured step finds their lengths; it
serves every layer. As many programs as there are rows, and some to spare, then take a share each, those that find none
behind all others. A row in one share is written at once. Of the others the program that is done last joins the parts.

Shapes: B rows, H query heads, G key-value heads, D numbers in a head, P tokens in a page, J slots: rows and spare ones.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from plait_kernels.attention.reference import RowShares
from plait_kernels.attention.triton import LOG2_E, attend_pages, fixed_shares, num_sms, tiling
from plait_kernels.kv_cache.reference import PageScales
from plait_kernels.pdl import pdl_launch, pdl_wait

_SPARE_PER_SM = 4
"""Programs for what deep rows are divided into, beyond one for each row and key-value head."""
_LEAST_PAGES = 4
"""Of a share: what joining it costs is as much as reading two."""
_MOST_FIXED = 4
"""Where all rows are divided alike into more shares than this, they are so few that depths need no look."""
_PAIRS, _MOST_SLOTS = 8192, 512
"""Of a slot and a row that a program of ``_divide`` compares, and slots of one."""
_PARTS = 16
"""Joined at once."""


def divide_rows(
    lengths_B: Tensor, page_size: int, num_heads: int, num_kv_heads: int, head_dim: int
) -> RowShares | None:
    """See ``plait_kernels.attention.divide_rows``."""
    num_rows, device = len(lengths_B), lengths_B.device
    if fixed_shares(num_rows * num_kv_heads, device) > _MOST_FIXED:
        return None
    spare = max(_SPARE_PER_SM * num_sms(device) // num_kv_heads, 1)
    num_slots = num_rows + spare
    shares_J4 = torch.empty(num_slots, 4, dtype=torch.int32, device=device)
    arrived_JG = torch.empty(num_slots, num_kv_heads, dtype=torch.int32, device=device)
    parts_JHD = torch.empty(num_slots, num_heads, head_dim, dtype=torch.float32, device=device)
    sums_JH = torch.empty(num_slots, num_heads, dtype=torch.float32, device=device)
    block = triton.next_power_of_2(num_rows)
    slots = min(max(_PAIRS // block, 1), _MOST_SLOTS)
    _divide[(triton.cdiv(num_slots, slots),)](
        lengths_B,
        shares_J4,
        arrived_JG,
        num_rows,
        num_slots,
        spare,
        PAGE=page_size,
        LEAST=_LEAST_PAGES,
        NUM_KV_HEADS=num_kv_heads,
        HEADS=triton.next_power_of_2(num_kv_heads),
        ROWS=block,
        SLOTS=slots,
        **pdl_launch(lengths_B),
    )
    return RowShares(shares_J4, arrived_JG, parts_JHD, sums_JH)


def decode_divided(
    q_BHD: Tensor,
    pages: Tensor,
    table_BW: Tensor,
    shares: RowShares,
    scale: float,
    out_BHD: Tensor,
    scales: PageScales,
) -> None:
    """``plait_kernels.attention.decode_paged`` of rows that are divided; D and P are powers of two, all contiguous."""
    _decode_share[(pages.shape[2], len(shares.of_J4))](
        q_BHD,
        pages,
        table_BW,
        *shares,
        out_BHD,
        scale * scales.k * LOG2_E,
        scales.v,
        table_BW.stride(0),
        PARTS=_PARTS,
        **tiling(q_BHD, pages),
        **pdl_launch(q_BHD),
    )


@triton.jit
def _num_shares(num_pages, per_share):  # type: ignore[no-untyped-def]
    """One for a row that is a quarter too long, too."""
    return tl.maximum((num_pages + per_share - 1 - per_share // 4) // per_share, 1)


@triton.jit(do_not_specialize=["num_rows", "num_slots", "spare"])
def _divide(  # type: ignore[no-untyped-def]
    lengths_ptr,
    shares_ptr,
    arrived_ptr,
    num_rows,
    num_slots,
    spare,
    PAGE: tl.constexpr,
    LEAST: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    SLOTS: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl_wait(PDL)
    row, slot = tl.arange(0, ROWS), tl.program_id(0) * SLOTS + tl.arange(0, SLOTS)
    num_pages = (tl.load(lengths_ptr + row, mask=row < num_rows, other=0) + PAGE - 1) // PAGE
    # All that is beyond a row's first share is paid for out of the pages: the spare slots are enough.
    per_share = tl.maximum((tl.sum(num_pages, axis=0) + spare - 1) // spare, LEAST)
    ends = tl.cumsum(tl.where(row < num_rows, _num_shares(num_pages, per_share), 0), axis=0)
    is_before = ends[None, :] <= slot[:, None]
    of = tl.sum(is_before.to(tl.int32), axis=1)
    first = tl.max(tl.where(is_before, ends[None, :], 0), axis=1)
    is_slot = slot < num_slots
    is_share = is_slot & (of < num_rows)
    length = tl.load(lengths_ptr + of, mask=is_share, other=0)
    tl.store(shares_ptr + slot * 4, tl.where(is_share, of, -1), mask=is_slot)
    tl.store(shares_ptr + slot * 4 + 1, slot - first, mask=is_slot)
    tl.store(shares_ptr + slot * 4 + 2, _num_shares((length + PAGE - 1) // PAGE, per_share), mask=is_slot)
    tl.store(shares_ptr + slot * 4 + 3, length, mask=is_slot)
    head = tl.arange(0, HEADS)
    at = slot[:, None] * NUM_KV_HEADS + head[None, :]
    tl.store(arrived_ptr + at, tl.zeros_like(at), mask=is_slot[:, None] & (head < NUM_KV_HEADS)[None, :])


@triton.jit(do_not_specialize=["table_stride"])
def _decode_share(  # type: ignore[no-untyped-def]
    q_ptr,
    pages_ptr,
    table_ptr,
    shares_ptr,
    arrived_ptr,
    parts_ptr,
    sums_ptr,
    out_ptr,
    scale,
    v_scale,
    table_stride,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl_wait(PDL)
    kv_head, slot = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row = tl.load(shares_ptr + slot * 4).to(tl.int64)
    share, num_shares = tl.load(shares_ptr + slot * 4 + 1), tl.load(shares_ptr + slot * 4 + 2)
    length = tl.load(shares_ptr + slot * 4 + 3)
    if row >= 0:
        num_pages = (length + PAGE - 1) // PAGE
        first, last = share * num_pages // num_shares, (share + 1) * num_pages // num_shares
        member, number = tl.arange(0, TILE), tl.arange(0, HEAD_DIM)
        is_head = member < GROUP
        head = kv_head * GROUP + member
        q_at = (row * NUM_KV_HEADS * GROUP + head)[:, None] * HEAD_DIM + number[None, :]
        q = tl.load(q_ptr + q_at, mask=is_head[:, None], other=0.0)
        table_ptr += row * table_stride
        best, total, out = attend_pages(
            q, pages_ptr, table_ptr, first, last, length, kv_head, scale, NUM_KV_HEADS, TILE, HEAD_DIM, PAGE
        )
        out = out * v_scale / total[:, None]
        if num_shares == 1:
            tl.store(out_ptr + q_at, out.to(out_ptr.dtype.element_ty), mask=is_head[:, None])
        else:
            part_at = slot * NUM_KV_HEADS * GROUP + head
            tl.store(sums_ptr + part_at, best + tl.log2(total), mask=is_head)
            tl.store(parts_ptr + part_at[:, None] * HEAD_DIM + number[None, :], out, mask=is_head[:, None])
            # Every thread's part lies there before one of them says so.
            tl.debug_barrier()
            first_slot = slot - share
            counter = arrived_ptr + first_slot * NUM_KV_HEADS + kv_head
            if tl.atomic_add(counter, 1, sem="acq_rel") == num_shares - 1:
                tl.store(counter, 0)
                out_ptr += row * NUM_KV_HEADS * GROUP * HEAD_DIM
                first_head, num_heads = kv_head * GROUP, NUM_KV_HEADS * GROUP
                _join(
                    parts_ptr, sums_ptr, out_ptr, first_slot, num_shares, first_head, num_heads, GROUP, HEAD_DIM, PARTS
                )


@triton.jit
def _join(  # type: ignore[no-untyped-def]
    parts_ptr,
    sums_ptr,
    out_ptr,
    first_slot,
    num_shares,
    first_head,
    num_heads,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Write a group's output from the parts of its row, in their order whoever joins them.

    Other programs' parts are read past the first cache, which knows nothing of them.
    """
    number, part = tl.arange(0, HEAD_DIM), tl.arange(0, PARTS)
    for member in tl.static_range(GROUP):
        head = first_head + member
        best, total = -float("inf"), 0.0
        out = tl.zeros([HEAD_DIM], tl.float32)
        for begin in range(0, num_shares, PARTS):
            is_part = begin + part < num_shares
            at = (first_slot + begin + part) * num_heads + head
            sums = tl.load(sums_ptr + at, mask=is_part, other=-float("inf"), cache_modifier=".cg")
            part_at = at[:, None] * HEAD_DIM + number[None, :]
            parts = tl.load(parts_ptr + part_at, mask=is_part[:, None], other=0.0, cache_modifier=".cg")
            new_best = tl.maximum(best, tl.max(sums, axis=0))
            weights = tl.exp2(sums - new_best)
            fade = tl.exp2(best - new_best)
            total = total * fade + tl.sum(weights, axis=0)
            out = out * fade + tl.sum(parts * weights[:, None], axis=0)
            best = new_best
        tl.store(out_ptr + head * HEAD_DIM + number, (out / total).to(out_ptr.dtype.element_ty))
