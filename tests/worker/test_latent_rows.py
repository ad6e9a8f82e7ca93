"""Which prefill rows of latent attention are absorbed, and how the cached context of the others is cut."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plait_worker.attention.context_pieces import context_pieces
from plait_worker.attention.short_appends import fits_graph, is_short

PAGE_SIZE, WIDTH = 4, 100


@settings(deadline=None, max_examples=50)
@given(contexts=st.lists(st.integers(0, 300), max_size=8), limit=st.integers(1, 200))
def test_pieces_hold_every_cached_token_once_in_order_and_no_more_than_their_limit(
    contexts: list[int], limit: int
) -> None:
    table = torch.randperm(len(contexts) * WIDTH).view(len(contexts), WIDTH).to(torch.int32)
    seen = []
    for piece in context_pieces(contexts, limit):
        assert 0 < piece.lengths.sum() <= limit
        assert len(contexts[piece.rows]) == len(piece.lengths)
        seen += piece.places(table, PAGE_SIZE).tolist()
    assert seen == [
        int(table[row, position // PAGE_SIZE]) * PAGE_SIZE + position % PAGE_SIZE
        for row, context in enumerate(contexts)
        for position in range(context)
    ]


def test_a_piece_begins_and_ends_with_a_row_that_it_holds_something_of() -> None:
    pieces = list(context_pieces([0, 6, 0, 0, 6, 0], 6))
    assert [(piece.first, piece.begins.tolist(), piece.lengths.tolist()) for piece in pieces] == [
        (1, [0], [6]),
        (4, [0], [6]),
    ]
    (whole,) = context_pieces([0, 6, 0, 3], 100)
    assert (whole.first, whole.lengths.tolist()) == (1, [6, 0, 3])
    assert whole.begins.dtype == np.int64


@pytest.mark.parametrize(
    ("starts", "lengths", "short"),
    [
        ([], [], True),
        ([0], [128], True),
        ([8000], [16], True),
        ([0] * 8, [64] * 8, True),
        ([0], [512], False),
        ([0], [2048], False),
        ([8000], [512], False),
    ],
)
def test_short_appends_are_absorbed(starts: list[int], lengths: list[int], short: bool) -> None:
    assert is_short(starts, lengths) == short


@pytest.mark.parametrize(
    ("starts", "lengths", "fits"), [([0], [1024], True), ([8000], [64], True), ([8000], [512], False)]
)
def test_a_captured_step_takes_more_of_them(starts: list[int], lengths: list[int], fits: bool) -> None:
    assert fits_graph(starts, lengths) == fits
