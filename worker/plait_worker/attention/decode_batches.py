"""What backends that gather pages need of a step: where tokens lie, and which decode rows go together.

Shapes: T tokens of the step, B decode rows of one batch, W pages of the longest one, L positions in them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from plait_worker.rows import Rows

MAX_GATHERED = 1 << 25
"""Numbers that one batch of decode rows may copy out of the pages."""


def pages_of_tokens(rows: Rows, page_size: int) -> Tensor:
    """The page that each token is written to, int64 ``[T]``."""
    device = rows.positions_T.device
    lengths_R = torch.tensor(rows.lengths, device=device)
    row_T = torch.arange(rows.num_rows, device=device).repeat_interleave(lengths_R, output_size=rows.num_tokens)
    return rows.page_table_RW[row_T, rows.positions_T // page_size].long()


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """Decode rows whose contexts are within a factor of two."""

    rows: slice | Tensor
    """Which of the step's decode rows, the first being 0."""
    table_BW: Tensor
    """Their pages."""
    mask_BL: Tensor
    """Added to the scores: 0 where a position belongs to the row's context, else -inf."""


def decode_batches(rows: Rows, page_size: int, page_numbers: int, dtype: torch.dtype) -> Iterator[DecodeRows]:
    """The decode rows in batches that bound what is gathered; ``page_numbers`` is how many numbers a page holds.

    ``dtype`` is the masks', the model's.
    """
    device = rows.page_table_RW.device
    ends = [start + 1 for start in rows.starts[rows.num_prefill :]]
    table_DW = rows.page_table_RW[rows.num_prefill :]
    for members in _similar(ends, page_size, page_numbers):
        is_run = members[-1] - members[0] + 1 == len(members)
        chosen = slice(members[0], members[-1] + 1) if is_run else torch.tensor(members, device=device)
        ends_B = torch.tensor([ends[row] for row in members], device=device)
        width = -(-max(ends[row] for row in members) // page_size)
        is_hidden_BL = torch.arange(width * page_size, device=device) >= ends_B[:, None]
        yield DecodeRows(chosen, table_DW[chosen, :width], added(is_hidden_BL, dtype))


def added(is_hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """What is added to the scores: a mask of booleans would be turned into this once a layer."""
    return torch.zeros(is_hidden.shape, dtype=dtype, device=is_hidden.device).masked_fill(is_hidden, -torch.inf)


def _similar(ends: list[int], page_size: int, page_numbers: int) -> Iterator[list[int]]:
    """Rows by the power of two that their pages fit in, and no more at a time than may be gathered."""
    by_size: dict[int, list[int]] = {}
    for row, end in enumerate(ends):
        by_size.setdefault((-(-end // page_size) - 1).bit_length(), []).append(row)
    for size, members in by_size.items():
        limit = max(1, MAX_GATHERED // (page_numbers << size))
        yield from (members[i : i + limit] for i in range(0, len(members), limit))
