"""Metadata that GPU backends share: slot mapping, lengths, and page tables in CSR form.

Shapes: T tokens of the step, R rows, W pages in the widest table, P prefill rows, D decode rows; J pages of all rows.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from plait_kernels import kv_cache
from torch import Tensor

from plait_worker.rows import DeviceLengths, Rows
from plait_worker.transfer import upload

Ints = NDArray[np.int64]


def device_lengths(rows: Rows) -> DeviceLengths | None:
    """Lengths of the prefill rows; None if all rows decode."""
    if rows.num_prefill == 0 or rows.device_lengths is not None:
        return rows.device_lengths
    num = rows.num_prefill
    lengths_R = np.array(rows.lengths)
    kv_P = lengths_R[:num] + np.array(rows.starts[:num])
    packed = np.concatenate(([0], lengths_R[:num].cumsum(), [0], kv_P.cumsum()))
    ends_q, ends_kv = upload(packed.astype(np.int32), rows.positions_T.device).view(2, num + 1)
    row_T = np.arange(rows.num_rows).repeat(lengths_R)
    return DeviceLengths(
        ends_q,
        ends_kv,
        upload(kv_P.astype(np.int32), rows.positions_T.device),
        upload(row_T, rows.positions_T.device),
        int(lengths_R[:num].max()),
        int(kv_P.max()),
    )


def slot_mapping(rows: Rows, lengths: DeviceLengths | None, page_size: int) -> Tensor:
    """int64 ``[T]``: page * page_size + offset of each token."""
    row_T = None if lengths is None else lengths.row_T
    return kv_cache.slot_mapping(rows.page_table_RW, row_T, rows.positions_T, page_size)


def token_slot_mapping(rows: Rows, page_size: int) -> Tensor:
    """As ``slot_mapping``, for decode rows of several tokens too. Rows of one length need no upload."""
    device = rows.positions_T.device
    if min(rows.lengths) == max(rows.lengths):
        one_R = torch.arange(rows.num_rows, device=device)
        row_T = one_R.repeat_interleave(rows.lengths[0], output_size=rows.num_tokens)
    else:
        row_T = upload(np.arange(rows.num_rows).repeat(rows.lengths), device)
    return kv_cache.slot_mapping(rows.page_table_RW, row_T, rows.positions_T, page_size)


def decode_lengths(rows: Rows) -> Tensor:
    """int32 ``[D]``: KV length of each decode row, from the device's positions."""
    return (rows.positions_T[rows.num_prefill_tokens :] + 1).to(torch.int32)


def page_indices(table_RW: Tensor, num_R: Ints) -> Tensor:
    """int32 ``[J]`` on the table's device: the first ``num_R`` pages of each row, one row after the other."""
    row_J = np.repeat(np.arange(len(num_R)), num_R)
    column_J = np.arange(int(num_R.sum())) - np.repeat(num_R.cumsum() - num_R, num_R)
    return table_RW.flatten()[upload(row_J * table_RW.shape[1] + column_J, table_RW.device)]


def indptr(counts_R: Ints) -> Tensor:
    """int32 ``[R + 1]`` on the host: the counts' prefix sums, from 0."""
    return torch.from_numpy(np.concatenate(([0], counts_R.cumsum())).astype(np.int32))
