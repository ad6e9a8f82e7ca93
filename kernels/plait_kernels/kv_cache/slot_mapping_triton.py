"""The slot mapping of a step in Triton: one kernel where torch takes seven.

Shapes: T tokens, R rows, W pages in the widest table.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_TOKENS = 128


def slot_mapping(table_RW: Tensor, row_T: Tensor | None, positions_T: Tensor, page_size: int) -> Tensor:
    """See ``plait_kernels.kv_cache.slot_mapping``; a row's pages are contiguous in the table."""
    num_tokens = positions_T.shape[0]
    slot_mapping_T = torch.empty(num_tokens, dtype=torch.int64, device=positions_T.device)
    if num_tokens:
        _slot_mapping[(triton.cdiv(num_tokens, _TOKENS),)](
            table_RW,
            positions_T if row_T is None else row_T,
            positions_T,
            slot_mapping_T,
            num_tokens,
            table_RW.stride(0),
            PAGE=page_size,
            HAS_ROWS=row_T is not None,
            TOKENS=_TOKENS,
            num_warps=4,
        )
    return slot_mapping_T


@triton.jit(
    do_not_specialize=["num_tokens", "table_stride"],
    do_not_specialize_on_alignment=["table_ptr", "row_ptr", "positions_ptr"],
)
def _slot_mapping(  # type: ignore[no-untyped-def]
    table_ptr,
    row_ptr,
    positions_ptr,
    slot_mapping_ptr,
    num_tokens,
    table_stride,
    PAGE: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    is_there = token < num_tokens
    position = tl.load(positions_ptr + token, mask=is_there, other=0)
    row = tl.load(row_ptr + token, mask=is_there, other=0) if HAS_ROWS else token.to(tl.int64)
    page = tl.load(table_ptr + row * table_stride + position // PAGE, mask=is_there, other=0).to(tl.int64)
    tl.store(slot_mapping_ptr + token, page * PAGE + position % PAGE, mask=is_there)
