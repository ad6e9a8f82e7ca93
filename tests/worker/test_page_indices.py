"""Planned kernels get every row's pages once, in order, and nothing of a table's padding."""

import numpy as np
import torch
from plait_worker.attention.lengths import indptr, page_indices

TABLE = torch.tensor([[7, 3, 99, 99], [99, 99, 99, 99], [5, 1, 8, 99]], dtype=torch.int32)
NUM_PAGES = np.array([2, 0, 3])


def test_rows_follow_each_other_without_padding() -> None:
    assert page_indices(TABLE, NUM_PAGES).tolist() == [7, 3, 5, 1, 8]


def test_indptr_says_where_each_row_begins_and_how_many_there_are() -> None:
    assert indptr(NUM_PAGES).tolist() == [0, 2, 2, 5]
    assert indptr(NUM_PAGES).dtype == torch.int32
