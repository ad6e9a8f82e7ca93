"""Rows with one query token or a few, as kernels that read lengths on the device take them.

Shapes: B rows, W pages in the widest row's table, T tokens of the step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from plait_worker.rows import Rows
from plait_worker.transfer import upload


@dataclass(frozen=True, slots=True)
class Ragged:
    """Rows of different numbers of query tokens."""

    ends: Tensor
    """int32 ``[B + 1]``: query tokens before each row."""
    max_queries: int
    """No row has more."""


@dataclass(frozen=True, slots=True)
class QueryRows:
    """At least one row."""

    queries: Ragged | int
    """Of each row; a number where all rows have it."""
    table_BW: Tensor
    """int32, contiguous."""
    lengths_B: Tensor
    """int32: positions that each row's last query token sees; the one before it sees one less."""
    num_tokens: int
    """Query tokens of all rows."""

    @property
    def num_rows(self) -> int:
        """B."""
        return self.table_BW.shape[0]


def query_rows(rows: Rows, part: range, first_token: int) -> QueryRows | None:
    """These rows of a step, whose tokens begin at ``first_token``; None where there are none.

    Rows of one length use nothing but the device's tensors.
    """
    if not part:
        return None
    lengths = rows.lengths[part.start : part.stop]
    table_BW = rows.page_table_RW[part.start : part.stop]
    num_tokens = sum(lengths)
    if max(lengths) == min(lengths):
        last_B = rows.positions_T[first_token : first_token + num_tokens].view(len(part), lengths[0])[:, -1]
        return QueryRows(lengths[0], table_BW, (last_B + 1).to(torch.int32), num_tokens)
    ends = np.cumsum([0, *lengths], dtype=np.int32)
    starts = rows.starts[part.start : part.stop]
    packed = np.concatenate((ends, np.add(starts, lengths, dtype=np.int32)))
    on_device = upload(packed, rows.positions_T.device)
    return QueryRows(Ragged(on_device[: len(ends)], max(lengths)), table_BW, on_device[len(ends) :], num_tokens)
