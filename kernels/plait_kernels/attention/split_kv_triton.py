"""Split-KV decode attention over pages in Triton (flash-decoding): each row gets splits by its KV length.

A skewed batch then takes no longer than an even one of as many tokens. One small kernel a step makes the schedule on
the device, from lengths that a captured step reads there; all layers use it. The grid has a slot for each row and some
spare ones; a slot takes one split of a row. A row of one split is written at once. For the others, the program that
finishes last combines the partial results.

Shapes: B rows, H query heads, G key-value heads, D dims of a head, P tokens in a page, J slots (rows and spare ones).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from plait_kernels.attention.decode_triton import LOG2_E, attend_pages, fixed_num_splits, num_sms, tiling
from plait_kernels.attention.reference import SplitKvSchedule
from plait_kernels.kv_cache.reference import PageScales
from plait_kernels.pdl import pdl_launch, pdl_wait

_SPARE_SLOTS_PER_SM = 4
"""Slots for further splits of long rows, beyond one for each row and key-value head."""
_MIN_PAGES = 4
"""Least pages of a split: combining one costs as much as reading two."""
_MAX_FIXED_SPLITS = 4
"""Above so many splits for every row alike, rows are so few that no schedule is needed."""
_PAIRS = 8192
"""Pairs of slot and row that a program of ``_schedule_kernel`` compares."""
_LEAST_BLOCK = 128
"""Of the rows that a program reads: smaller ones would be kernels of their own, compiled in the middle of serving."""
_PARTIALS = 16
"""Partial results that are combined at once."""


def schedule_split_kv(
    lengths_B: Tensor, page_size: int, num_heads: int, num_kv_heads: int, head_dim: int
) -> SplitKvSchedule | None:
    """See ``plait_kernels.attention.schedule_split_kv``."""
    if fixed_num_splits(len(lengths_B) * num_kv_heads, lengths_B.device) > _MAX_FIXED_SPLITS:
        return None
    num_spare = max(_SPARE_SLOTS_PER_SM * num_sms(lengths_B.device) // num_kv_heads, 1)
    return make_schedule(
        lengths_B,
        unit=page_size,
        heads=(num_heads, num_kv_heads),
        head_dim=head_dim,
        num_spare=num_spare,
        least_units=_MIN_PAGES,
        num_partials=len(lengths_B) + num_spare,
    )


def make_schedule(
    lengths_B: Tensor,
    *,
    unit: int,
    heads: tuple[int, int],
    head_dim: int,
    num_spare: int,
    least_units: int,
    num_partials: int,
    num_programs: int | None = None,
) -> SplitKvSchedule:
    """The schedule of any number of rows. A split is of whole units of tokens, at least ``least_units`` of them.

    ``heads`` are the query and the key-value heads. ``num_spare`` bounds the splits beyond one for each row. There is
    room for ``num_partials`` partial results. If only ``num_programs`` take slots, and rows are fewer, none takes two:
    a second split takes longer than a longer one.
    """
    (num_heads, num_kv_heads), num_rows, device = heads, len(lengths_B), lengths_B.device
    num_slots = num_rows + num_spare
    splits_J4 = torch.empty(num_slots, 4, dtype=torch.int32, device=device)
    num_done_JG = torch.empty(num_slots, num_kv_heads, dtype=torch.int32, device=device)
    partial_JHD = torch.empty(num_partials, num_heads, head_dim, dtype=torch.float32, device=device)
    lse_JH = torch.empty(num_partials, num_heads, dtype=torch.float32, device=device)
    block = max(triton.next_power_of_2(num_rows), _LEAST_BLOCK)
    slots = max(_PAIRS // block, 1)
    _schedule_kernel[(triton.cdiv(num_slots, slots),)](
        lengths_B,
        splits_J4,
        num_done_JG,
        num_rows,
        num_slots,
        num_spare,
        num_slots if num_programs is None else num_programs,
        PAGE=unit,
        MIN_PAGES=least_units,
        NUM_KV_HEADS=num_kv_heads,
        HEADS=triton.next_power_of_2(num_kv_heads),
        ROWS=block,
        SLOTS=slots,
        **pdl_launch(lengths_B),
    )
    return SplitKvSchedule(splits_J4, num_done_JG, partial_JHD, lse_JH)


def decode_split_kv(
    q_BHD: Tensor,
    pages: Tensor,
    table_BW: Tensor,
    schedule: SplitKvSchedule,
    scale: float,
    out_BHD: Tensor,
    scales: PageScales,
) -> None:
    """``plait_kernels.attention.decode_paged`` with a schedule; D and P are powers of two, all contiguous."""
    _decode_split_kernel[(pages.shape[2], len(schedule.splits_J4))](
        q_BHD,
        pages,
        table_BW,
        *schedule,
        out_BHD,
        scale * scales.k * LOG2_E,
        scales.v,
        table_BW.stride(0),
        PARTIALS=_PARTIALS,
        **tiling(q_BHD, pages),
        **pdl_launch(q_BHD),
    )


@triton.jit
def _num_splits(num_pages, pages_per_split):  # type: ignore[no-untyped-def]
    """Splits of a row; a quarter of a split more does not open another."""
    return tl.maximum((num_pages + pages_per_split - 1 - pages_per_split // 4) // pages_per_split, 1)


@triton.jit(
    do_not_specialize=["num_rows", "num_slots", "spare", "num_programs"],
    do_not_specialize_on_alignment=["lengths_ptr"],
)
def _schedule_kernel(  # type: ignore[no-untyped-def]
    lengths_ptr,
    splits_ptr,
    num_done_ptr,
    num_rows,
    num_slots,
    spare,
    num_programs,
    PAGE: tl.constexpr,
    MIN_PAGES: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    SLOTS: tl.constexpr,
    PDL: tl.constexpr,
):
    # The next kernel starts when this one has ended: the one that attends reads the schedule before it waits.
    if PDL:
        gdc_wait()
    row, slot = tl.arange(0, ROWS), tl.program_id(0) * SLOTS + tl.arange(0, SLOTS)
    num_pages = (tl.load(lengths_ptr + row, mask=row < num_rows, other=0) + PAGE - 1) // PAGE
    # Further splits of all rows together are at most ``spare``: each stands for that share of the batch's pages.
    total = tl.sum(num_pages, axis=0)
    pages_per_split = tl.maximum((total + spare - 1) // spare, MIN_PAGES)
    num_splits = tl.where(row < num_rows, _num_splits(num_pages, pages_per_split), 0)
    free = num_programs - num_rows
    if (free > 0) & (tl.sum(num_splits, axis=0) > num_programs):
        long = tl.sum(tl.where(num_pages > pages_per_split, num_pages, 0), axis=0)
        pages_per_split = tl.maximum((long + free - 1) // free, pages_per_split)
        num_splits = tl.where(row < num_rows, _num_splits(num_pages, pages_per_split), 0)
    ends = tl.cumsum(num_splits, axis=0)
    is_before = ends[None, :] <= slot[:, None]
    of = tl.sum(is_before.to(tl.int32), axis=1)
    first = tl.max(tl.where(is_before, ends[None, :], 0), axis=1)
    is_slot = slot < num_slots
    is_split = is_slot & (of < num_rows)
    length = tl.load(lengths_ptr + of, mask=is_split, other=0)
    tl.store(splits_ptr + slot * 4, tl.where(is_split, of, -1), mask=is_slot)
    tl.store(splits_ptr + slot * 4 + 1, slot - first, mask=is_slot)
    tl.store(splits_ptr + slot * 4 + 2, _num_splits((length + PAGE - 1) // PAGE, pages_per_split), mask=is_slot)
    tl.store(splits_ptr + slot * 4 + 3, length, mask=is_slot)
    head = tl.arange(0, HEADS)
    at = slot[:, None] * NUM_KV_HEADS + head[None, :]
    tl.store(num_done_ptr + at, tl.zeros_like(at), mask=is_slot[:, None] & (head < NUM_KV_HEADS)[None, :])


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=["table_ptr"])
def _decode_split_kernel(  # type: ignore[no-untyped-def]
    q_ptr,
    pages_ptr,
    table_ptr,
    splits_ptr,
    num_done_ptr,
    partial_ptr,
    lse_ptr,
    out_ptr,
    scale,
    v_scale,
    table_stride,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    PARTIALS: tl.constexpr,
    PDL: tl.constexpr,
):
    kv_head, slot = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row = tl.load(splits_ptr + slot * 4).to(tl.int64)
    split, num_splits = tl.load(splits_ptr + slot * 4 + 1), tl.load(splits_ptr + slot * 4 + 2)
    length = tl.load(splits_ptr + slot * 4 + 3)
    num_pages = (length + PAGE - 1) // PAGE
    first, last = split * num_pages // num_splits, (split + 1) * num_pages // num_splits
    table_ptr += row * table_stride
    pdl_wait(PDL)
    if row >= 0:
        head_in_group, dim = tl.arange(0, TILE), tl.arange(0, HEAD_DIM)
        is_head = head_in_group < GROUP
        head = kv_head * GROUP + head_in_group
        q_at = (row * NUM_KV_HEADS * GROUP + head)[:, None] * HEAD_DIM + dim[None, :]
        q = tl.load(q_ptr + q_at, mask=is_head[:, None], other=0.0)
        best, total, out = attend_pages(
            q, pages_ptr, table_ptr, first, last, length, kv_head, scale, NUM_KV_HEADS, TILE, HEAD_DIM, PAGE
        )
        out = out * v_scale / total[:, None]
        if num_splits == 1:
            tl.store(out_ptr + q_at, out.to(out_ptr.dtype.element_ty), mask=is_head[:, None])
        else:
            partial_at = slot * NUM_KV_HEADS * GROUP + head
            tl.store(lse_ptr + partial_at, best + tl.log2(total), mask=is_head)
            tl.store(partial_ptr + partial_at[:, None] * HEAD_DIM + dim[None, :], out, mask=is_head[:, None])
            # All threads have stored their partial result before the counter says so.
            tl.debug_barrier()
            first_slot = slot - split
            counter = num_done_ptr + first_slot * NUM_KV_HEADS + kv_head
            if tl.atomic_add(counter, 1, sem="acq_rel") == num_splits - 1:
                tl.store(counter, 0)
                out_ptr += row * NUM_KV_HEADS * GROUP * HEAD_DIM
                first_head, num_heads = kv_head * GROUP, NUM_KV_HEADS * GROUP
                _combine(
                    partial_ptr,
                    lse_ptr,
                    out_ptr,
                    first_slot,
                    num_splits,
                    first_head,
                    num_heads,
                    GROUP,
                    HEAD_DIM,
                    PARTIALS,
                )


@triton.jit
def _combine(  # type: ignore[no-untyped-def]
    partial_ptr,
    lse_ptr,
    out_ptr,
    first_slot,
    num_splits,
    first_head,
    num_heads,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PARTIALS: tl.constexpr,
):
    """Write a group's output from its row's partial results, in their order whichever program combines them.

    Loads bypass the L1 cache, which may not hold what other programs stored.
    """
    dim, index = tl.arange(0, HEAD_DIM), tl.arange(0, PARTIALS)
    for head_in_group in tl.static_range(GROUP):
        head = first_head + head_in_group
        best, total = -float("inf"), 0.0
        out = tl.zeros([HEAD_DIM], tl.float32)
        for begin in range(0, num_splits, PARTIALS):
            is_partial = begin + index < num_splits
            at = (first_slot + begin + index) * num_heads + head
            lse = tl.load(lse_ptr + at, mask=is_partial, other=-float("inf"), cache_modifier=".cg")
            partial_at = at[:, None] * HEAD_DIM + dim[None, :]
            partial = tl.load(partial_ptr + partial_at, mask=is_partial[:, None], other=0.0, cache_modifier=".cg")
            best, total, out = add_partials(best, total, out, lse, partial)
        tl.store(out_ptr + head * HEAD_DIM + dim, (out / total).to(out_ptr.dtype.element_ty))


@triton.jit
def add_partials(best, total, out, lse, partial):  # type: ignore[no-untyped-def]
    """Partial results of a row, ``[PARTIALS, D]`` with an LSE each, into a sum of weights and a weighted sum."""
    new_best = tl.maximum(best, tl.max(lse, axis=0))
    weights = tl.exp2(lse - new_best)
    fade = tl.exp2(best - new_best)
    return new_best, total * fade + tl.sum(weights, axis=0), out * fade + tl.sum(partial * weights[:, None], axis=0)
