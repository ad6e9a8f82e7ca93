"""Page tables as flashinfer's planned kernels take them: one list of pages, and where each row's share of it ends.

Shapes: R rows, W the widest table, J pages of all rows.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from plait_worker.attention.context_pieces import Ints
from plait_worker.transfer import upload


def packed_pages(table_RW: Tensor, num_R: Ints) -> Tensor:
    """int32 ``[J]``, on the table's device: the first ``num_R`` pages of each row, row after row."""
    row_J = np.repeat(np.arange(len(num_R)), num_R)
    place_J = np.arange(int(num_R.sum())) - np.repeat(num_R.cumsum() - num_R, num_R)
    return table_RW.flatten()[upload(row_J * table_RW.shape[1] + place_J, table_RW.device)]


def ends(counts_R: Ints) -> Tensor:
    """int32 ``[R + 1]`` on the host: how many lie before each row, and in all."""
    return torch.from_numpy(np.concatenate(([0], counts_R.cumsum())).astype(np.int32))
