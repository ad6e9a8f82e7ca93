"""What the torch backends share: page lookup, batches of decode rows, and the SDPA kernel.

Shapes: T tokens of the step, B decode rows of one batch, W pages of the longest one, L positions in them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from plait_worker.rows import Rows

MAX_GATHERED = 1 << 25
"""Elements that one batch of decode rows may copy out of the pages."""
QUERY_BLOCK = 128
"""Queries of a prefill row that attend at a time: bounds the mask and skips keys that none of them sees."""


def pages_of_tokens(rows: Rows, page_size: int) -> Tensor:
    """int64 ``[T]``: the page that each token is written to."""
    device = rows.positions_T.device
    lengths_R = torch.tensor(rows.lengths, device=device)
    row_T = torch.arange(rows.num_rows, device=device).repeat_interleave(lengths_R, output_size=rows.num_tokens)
    return rows.page_table_RW[row_T, rows.positions_T // page_size].long()


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """Decode rows whose KV lengths are within a factor of two."""

    rows: slice | Tensor
    """Indices among the step's decode rows."""
    table_BW: Tensor
    """Their pages."""
    mask_BL: Tensor
    """Added to the scores: 0 for positions that the row sees, else -inf."""


def decode_batches(
    rows: Rows, page_size: int, page_elements: int, dtype: torch.dtype, window: int | None = None
) -> Iterator[DecodeRows]:
    """The decode rows in batches of bounded gather size; a page holds ``page_elements``.

    ``dtype`` is the masks', the model's; ``window`` as in ``MhaShape``.
    """
    device = rows.page_table_RW.device
    ends = [start + 1 for start in rows.starts[rows.num_prefill :]]
    table_DW = rows.page_table_RW[rows.num_prefill :]
    for members in _group_by_num_pages(ends, page_size, page_elements):
        is_run = members[-1] - members[0] + 1 == len(members)
        chosen = slice(members[0], members[-1] + 1) if is_run else torch.tensor(members, device=device)
        ends_B = torch.tensor([ends[row] for row in members], device=device)
        width = -(-max(ends[row] for row in members) // page_size)
        positions_L = torch.arange(width * page_size, device=device)
        is_hidden_BL = positions_L >= ends_B[:, None]
        if window is not None:
            is_hidden_BL |= positions_L < ends_B[:, None] - window
        yield DecodeRows(chosen, table_DW[chosen, :width], additive_mask(is_hidden_BL, dtype))


def additive_mask(is_hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """An additive mask; a boolean one would be converted in every layer."""
    return torch.zeros(is_hidden.shape, dtype=dtype, device=is_hidden.device).masked_fill(is_hidden, -torch.inf)


def math_sdpa(device: torch.device) -> AbstractContextManager[None]:
    """Selects SDPA's math kernel on a GPU: its fused kernels refuse masks at odd addresses."""
    return sdpa_kernel(SDPBackend.MATH) if device.type == "cuda" else nullcontext()


def _group_by_num_pages(ends: list[int], page_size: int, page_elements: int) -> Iterator[list[int]]:
    """Rows grouped by pages to the next power of two, within ``MAX_GATHERED``."""
    by_size: dict[int, list[int]] = {}
    for row, end in enumerate(ends):
        by_size.setdefault((-(-end // page_size) - 1).bit_length(), []).append(row)
    for size, members in by_size.items():
        limit = max(1, MAX_GATHERED // (page_elements << size))
        yield from (members[i : i + limit] for i in range(0, len(members), limit))
