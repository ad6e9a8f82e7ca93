"""Rows of one or a few query tokens, for kernels that read lengths on the device.

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
    """Rows with different numbers of query tokens."""

    ends: Tensor
    """int32 ``[B + 1]``: query tokens before each row."""
    max_queries: int
    """Upper bound of a row's query tokens."""


@dataclass(frozen=True, slots=True)
class DeviceMetadata:
    """At least one row."""

    queries: Ragged | int
    """Of each row; an int if all rows have the same number."""
    table_BW: Tensor
    """int32, contiguous."""
    lengths_B: Tensor
    """int32: KV length of each row's last query token; the token before it sees one less."""
    num_tokens: int
    """Query tokens of all rows."""

    @property
    def num_rows(self) -> int:
        """B."""
        return self.table_BW.shape[0]


def build_device_metadata(rows: Rows, part: range, first_token: int) -> DeviceMetadata | None:
    """The rows ``part`` of a step, whose tokens begin at ``first_token``; None for an empty part.

    Rows of one length need no upload.
    """
    if not part:
        return None
    lengths = rows.lengths[part.start : part.stop]
    table_BW = rows.page_table_RW[part.start : part.stop]
    num_tokens = sum(lengths)
    if max(lengths) == min(lengths):
        last_B = rows.positions_T[first_token : first_token + num_tokens].view(len(part), lengths[0])[:, -1]
        return DeviceMetadata(lengths[0], table_BW, (last_B + 1).to(torch.int32), num_tokens)
    ends = np.cumsum([0, *lengths], dtype=np.int32)
    starts = rows.starts[part.start : part.stop]
    packed = np.concatenate((ends, np.add(starts, lengths, dtype=np.int32)))
    on_device = upload(packed, rows.positions_T.device)
    return DeviceMetadata(Ragged(on_device[: len(ends)], max(lengths)), table_BW, on_device[len(ends) :], num_tokens)
