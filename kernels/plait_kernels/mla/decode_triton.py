"""Split-KV decode of absorbed queries over latent pages in Triton: a program takes some tokens of one row.

The cache is key and value of one head that all query heads share: a tile of tokens is loaded once, into shared memory,
where both dots read it. Tokens and dims are the tiles' rows and heads their columns, so that tensor cores take 16 heads
without padding (wgmma wants 64 rows). A small kernel once a step makes the schedule of splits, by KV length, from
lengths on the device (``plait_kernels.attention.split_kv_triton``). A row of one split is written at once; the partial
results of others are combined by a second kernel, over all of the device: a partial result is as large as half a page,
and one program alone would need 30 us for the 100 of a long row.

What a row has is read before ``pdl_wait``: see ``plait_kernels.mla.decode_absorbed``.

Shapes as in ``plait_kernels.mla``; J slots of the schedule.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from plait_kernels.attention import split_kv_triton
from plait_kernels.attention.decode_triton import LOG2_E, num_sms
from plait_kernels.attention.reference import SplitKvSchedule
from plait_kernels.attention.split_kv_triton import add_partials
from plait_kernels.mla.reference import AbsorbedRows
from plait_kernels.pdl import pdl_launch, pdl_wait


class Tiling(NamedTuple):
    """How the kernel is compiled and how rows are split."""

    tokens: int
    """Of a tile; at most a page. From 64 on, wgmma computes the scores."""
    num_warps: int
    num_stages: int
    """One more than the tiles in shared memory: as many are loaded at a time, the next when one is done."""
    programs_per_sm: int
    """That registers and shared memory have room for. Each takes slots until none is left: with a program for each slot
    the empty ones would hold up others, since few fit at once."""
    least_tokens: int
    """Of a split. Combining one writes and reads 4 bytes a head and dim: with 16 heads as much as 57 tokens."""
    splits_per_sm: int
    """Further splits of all rows together, beyond one for each, for each streaming multiprocessor."""


TILINGS = {
    16: Tiling(tokens=64, num_warps=4, num_stages=3, programs_per_sm=1, least_tokens=192, splits_per_sm=1),
    32: Tiling(tokens=64, num_warps=8, num_stages=3, programs_per_sm=1, least_tokens=128, splits_per_sm=2),
    64: Tiling(tokens=32, num_warps=8, num_stages=3, programs_per_sm=1, least_tokens=256, splits_per_sm=2),
}
"""By the heads of a program. Measured on an H200 with 16 heads."""
MANY_ROWS_TILINGS = {
    16: Tiling(tokens=64, num_warps=4, num_stages=2, programs_per_sm=2, least_tokens=192, splits_per_sm=1),
}
"""Others for more rows than multiprocessors: what a program waits for at a row's begin and end, a second one hides."""
_FEW_ROWS = 8
"""So few leave multiprocessors idle: a split may be of a third of the tokens."""
_COMBINED = 8192
"""Elements of partial results that a program combines at once: 64 registers a thread."""
_COMBINING_PROGRAMS = 1024
"""Above so many, a program takes several heads: most have nothing to do where rows are many."""
_FEW_ROWS_DIMS = 128
"""So few rows may have a hundred splits each: more programs combine fewer dims each."""


def schedule_absorbed(lengths_B: Tensor, page_size: int, num_heads: int, latent_dim: int) -> SplitKvSchedule:
    """See ``plait_kernels.mla.schedule_absorbed``."""
    heads, tiling = _tiling(num_heads, page_size, lengths_B)
    head_tiles = triton.cdiv(num_heads, heads)
    num_spare = max(tiling.splits_per_sm * num_sms(lengths_B.device) // head_tiles, 1)
    return split_kv_triton.make_schedule(
        lengths_B,
        unit=tiling.tokens,
        heads=(num_heads, 1),
        head_dim=latent_dim,
        num_spare=num_spare,
        least_units=max(tiling.least_tokens // tiling.tokens, 1),
        num_partials=2 * num_spare,
        num_programs=_num_programs(tiling, head_tiles, lengths_B),
    )


def decode_absorbed(q_BHC: Tensor, pages: Tensor, rows: AbsorbedRows, scale: float, out_BHL: Tensor) -> None:
    """See ``plait_kernels.mla.decode_absorbed``; L, R and the page size are powers of two, all contiguous."""
    (num_rows, num_heads, cached_dim), latent_dim, schedule = q_BHC.shape, out_BHL.shape[2], rows.schedule
    if schedule is None:
        raise AssertionError("absorbed rows on a GPU without a schedule")
    heads, tiling = _tiling(num_heads, pages.shape[1], q_BHC)
    num_slots = len(schedule.splits_J4)
    head_tiles = triton.cdiv(num_heads, heads)
    _decode_kernel[(head_tiles, min(num_slots, _num_programs(tiling, head_tiles, q_BHC)))](
        q_BHC,
        pages,
        rows.table_BW,
        schedule.splits_J4,
        schedule.partial_JHD,
        schedule.lse_JH,
        out_BHL,
        scale * LOG2_E,
        num_slots,
        rows.table_BW.stride(0),
        NUM_HEADS=num_heads,
        HEADS=heads,
        LATENT=latent_dim,
        ROPE=cached_dim - latent_dim,
        PAGE=pages.shape[1],
        TOKENS=tiling.tokens,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        **pdl_launch(q_BHC),
    )
    dims = min(latent_dim, _FEW_ROWS_DIMS) if num_rows <= _FEW_ROWS else latent_dim
    programs_of_row = min(num_heads, max(_COMBINING_PROGRAMS // num_rows, 1))
    _combine_kernel[(num_rows, programs_of_row, latent_dim // dims)](
        schedule.splits_J4,
        schedule.partial_JHD,
        schedule.lse_JH,
        out_BHL,
        num_slots,
        num_heads,
        LATENT=latent_dim,
        DIMS=dims,
        SLOTS=triton.next_power_of_2(num_slots),
        PARTIALS=_COMBINED // dims,
        num_warps=4,
        **pdl_launch(q_BHC),
    )


def _tiling(num_heads: int, page_size: int, rows: Tensor) -> tuple[int, Tiling]:
    """Heads of a program, and its tiling for so many rows: a tile of tokens is in one page."""
    heads = min(max(triton.next_power_of_2(num_heads), min(TILINGS)), max(TILINGS))
    tiling = TILINGS[heads]
    if len(rows) > num_sms(rows.device):
        tiling = MANY_ROWS_TILINGS.get(heads, tiling)
    least_tokens = tiling.least_tokens // 3 if len(rows) <= _FEW_ROWS else tiling.least_tokens
    return heads, tiling._replace(tokens=min(tiling.tokens, page_size), least_tokens=least_tokens)


def _num_programs(tiling: Tiling, head_tiles: int, rows: Tensor) -> int:
    """That take slots, for each tile of heads."""
    return max(tiling.programs_per_sm * num_sms(rows.device) // head_tiles, 1)


@triton.jit(do_not_specialize=["num_slots", "table_stride"], do_not_specialize_on_alignment=["table_ptr"])
def _decode_kernel(  # type: ignore[no-untyped-def]
    q_ptr,
    pages_ptr,
    table_ptr,
    splits_ptr,
    partial_ptr,
    lse_ptr,
    out_ptr,
    scale,
    num_slots,
    table_stride,
    NUM_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    PAGE: tl.constexpr,
    TOKENS: tl.constexpr,
    PDL: tl.constexpr,
):
    head, dim = tl.program_id(0) * HEADS + tl.arange(0, HEADS), tl.arange(0, LATENT)
    is_head = (head < NUM_HEADS)[None, :]
    first_slot, stride = tl.program_id(1), tl.num_programs(1)
    row, split, num_splits, first, last, length, page = _read_slot(
        splits_ptr, table_ptr, first_slot, num_slots, table_stride, PAGE, TOKENS
    )
    pdl_wait(PDL)
    # The addresses in a tile are made anew for each slot: kept over the loop, they would not fit into registers.
    for slot in tl.range(first_slot, num_slots, stride, disable_licm=True):
        if row >= 0:
            q_at = q_ptr + (row * NUM_HEADS + head)[None, :] * (LATENT + ROPE)
            row_table_ptr = table_ptr + row * table_stride
            best, total, out = _attend(
                q_at,
                is_head,
                pages_ptr,
                row_table_ptr,
                page,
                first,
                last,
                length,
                scale,
                HEADS,
                LATENT,
                ROPE,
                PAGE,
                TOKENS,
            )
            out *= (1.0 / total)[None, :]
            if num_splits == 1:
                out_at = out_ptr + (row * NUM_HEADS + head)[None, :] * LATENT + dim[:, None]
                tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=is_head)
            else:
                at = (_first_partial(row, slot - split) + split) * NUM_HEADS + head
                tl.store(lse_ptr + at, best + tl.log2(total), mask=head < NUM_HEADS)
                tl.store(partial_ptr + at[None, :] * LATENT + dim[:, None], out, mask=is_head)
        row, split, num_splits, first, last, length, page = _read_slot(
            splits_ptr, table_ptr, slot + stride, num_slots, table_stride, PAGE, TOKENS
        )


@triton.jit
def _read_slot(  # type: ignore[no-untyped-def]
    splits_ptr, table_ptr, slot, num_slots, table_stride, PAGE: tl.constexpr, TOKENS: tl.constexpr
):
    """Its row, -1 if there is none; split, number of splits, first and last tile, KV length, and first page."""
    is_slot = slot < num_slots
    row = tl.load(splits_ptr + slot * 4, mask=is_slot, other=-1).to(tl.int64)
    split = tl.load(splits_ptr + slot * 4 + 1, mask=is_slot, other=0)
    num_splits = tl.load(splits_ptr + slot * 4 + 2, mask=is_slot, other=1)
    length = tl.load(splits_ptr + slot * 4 + 3, mask=is_slot, other=0)
    num_tiles = (length + TOKENS - 1) // TOKENS
    first, last = split * num_tiles // num_splits, (split + 1) * num_tiles // num_splits
    page = tl.load(table_ptr + row * table_stride + first * TOKENS // PAGE, mask=(row >= 0) & (first < last), other=0)
    return row, split, num_splits, first, last, length, page


@triton.jit
def _first_partial(row, first_slot):  # type: ignore[no-untyped-def]
    """Where a row's partial results begin.

    Rows of one split have none: a row takes twice the slots that the rows before it have beyond one each, and with two
    splits or more it needs no more than that.
    """
    return (first_slot - row) * 2


@triton.jit
def _attend(  # type: ignore[no-untyped-def]
    q_at,
    is_head,
    pages_ptr,
    table_ptr,
    page,
    first,
    last,
    length,
    scale,
    HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    PAGE: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Some heads over some tiles of a row: the largest score, the sum of weights, and the weighted sum ``[L, heads]``.

    ``page`` is the first tile's. The sum of weights is kept by token and reduced once.
    """
    dim, rope, token = tl.arange(0, LATENT), tl.arange(0, ROPE), tl.arange(0, TOKENS)
    q = tl.load(q_at + dim[:, None], mask=is_head, other=0.0)
    q_rope = tl.load(q_at + LATENT + rope[:, None], mask=is_head, other=0.0)
    best = tl.full([HEADS], -float("inf"), tl.float32)
    totals = tl.zeros([TOKENS, HEADS], tl.float32)
    out = tl.zeros([LATENT, HEADS], tl.float32)
    inside = token[:, None] * (LATENT + ROPE) + dim[None, :]
    inside_rope = token[:, None] * (LATENT + ROPE) + LATENT + rope[None, :]
    tl.assume(length >= 0)
    for tile in range(first, last):
        begin = pages_ptr + (page.to(tl.int64) * PAGE + tile * TOKENS % PAGE) * (LATENT + ROPE)
        # Tokens past the row's end are not read: their weight of 0 would not hide a NaN.
        is_seen = tile * TOKENS + token < length
        latent = tl.load(begin + inside, mask=is_seen[:, None], other=0.0)
        key = tl.load(begin + inside_rope, mask=is_seen[:, None], other=0.0)
        page = tl.load(table_ptr + (tile + 1) * TOKENS // PAGE, mask=tile + 1 < last, other=0)
        scores = tl.dot(latent, q, tl.dot(key, q_rope)) * scale
        scores = tl.where(is_seen[:, None], scores, -float("inf"))
        new_best = tl.maximum(best, tl.max(scores, axis=0))
        weights = tl.exp2(scores - new_best[None, :])
        fade = tl.exp2(best - new_best)
        totals = totals * fade[None, :] + weights
        out = tl.dot(tl.trans(latent), weights.to(latent.dtype), out * fade[None, :])
        best = new_best
        if length < 0:
            # Never, and the compiler drops it in the end. It gives a tile that only wgmma reads one more buffer than
            # num_stages - 1, and a third does not fit; a use beside wgmma makes it keep to that number.
            tl.store(pages_ptr + inside, latent)
    return best, tl.sum(totals, axis=0), out


@triton.jit(do_not_specialize=["num_slots", "num_heads"])
def _combine_kernel(  # type: ignore[no-untyped-def]
    splits_ptr,
    partial_ptr,
    lse_ptr,
    out_ptr,
    num_slots,
    num_heads,
    LATENT: tl.constexpr,
    DIMS: tl.constexpr,
    SLOTS: tl.constexpr,
    PARTIALS: tl.constexpr,
    PDL: tl.constexpr,
):
    row, dim = tl.program_id(0).to(tl.int64), tl.program_id(2) * DIMS + tl.arange(0, DIMS)
    slot, index = tl.arange(0, SLOTS), tl.arange(0, PARTIALS)
    rows = tl.load(splits_ptr + slot * 4, mask=slot < num_slots, other=-1)
    first = tl.min(tl.where(rows == row, slot, num_slots), axis=0)
    num_splits, first_partial = tl.load(splits_ptr + first * 4 + 2), _first_partial(row, first)
    pdl_wait(PDL)  # without partial results too: what is after this kernel waits for this one only
    if num_splits > 1:
        for head in range(tl.program_id(1), num_heads, tl.num_programs(1)):
            best, total = -float("inf"), 0.0
            out = tl.zeros([DIMS], tl.float32)
            for begin in range(0, num_splits, PARTIALS):
                is_partial = begin + index < num_splits
                at = (first_partial + begin + index) * num_heads + head
                lse = tl.load(lse_ptr + at, mask=is_partial, other=-float("inf"))
                partial_at = partial_ptr + at[:, None] * LATENT + dim[None, :]
                partial = tl.load(partial_at, mask=is_partial[:, None], other=0.0)
                best, total, out = add_partials(best, total, out, lse, partial)
            out_at = out_ptr + (row * num_heads + head) * LATENT + dim
            tl.store(out_at, (out / total).to(out_ptr.dtype.element_ty))
