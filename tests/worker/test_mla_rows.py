"""Which prefill rows of latent attention are absorbed, and how the cached context of the others is cut."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plait_worker.attention.mla.cached_context import context_chunks, even_chunks, padded_lengths
from plait_worker.attention.mla.short_extend import are_short_extends, best_captured_size
from plait_worker.graph_sizes import GraphSize

PAGE_SIZE, WIDTH = 4, 100


@settings(deadline=None, max_examples=50)
@given(contexts=st.lists(st.integers(0, 300), max_size=8), limit=st.integers(1, 200))
def test_pieces_hold_every_cached_token_once_in_order_and_no_more_than_their_limit(
    contexts: list[int], limit: int
) -> None:
    table = torch.randperm(len(contexts) * WIDTH).view(len(contexts), WIDTH).to(torch.int32)
    seen = []
    for chunk in context_chunks(contexts, limit):
        assert 0 < chunk.lengths.sum() <= limit
        assert len(contexts[chunk.rows]) == len(chunk.lengths)
        seen += chunk.slot_mapping(table, PAGE_SIZE).tolist()
    assert seen == [
        int(table[row, position // PAGE_SIZE]) * PAGE_SIZE + position % PAGE_SIZE
        for row, context in enumerate(contexts)
        for position in range(context)
    ]


def test_a_piece_begins_and_ends_with_a_row_that_it_holds_something_of() -> None:
    chunks = list(context_chunks([0, 6, 0, 0, 6, 0], 6))
    assert [(chunk.first, chunk.begins.tolist(), chunk.lengths.tolist()) for chunk in chunks] == [
        (1, [0], [6]),
        (4, [0], [6]),
    ]
    (whole,) = context_chunks([0, 6, 0, 3], 100)
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
    assert are_short_extends(starts, lengths) == short


ABSORBING, PLANNED = GraphSize(1000, 17, 24), GraphSize(1000, 17, 24, 8192)


@pytest.mark.parametrize(
    ("starts", "lengths", "best"),
    [
        ([0], [128], ABSORBING),
        ([8000], [16], ABSORBING),
        ([0], [1000], PLANNED),
        ([8000], [32], ABSORBING),
        ([8000], [512], PLANNED),
    ],
)
def test_captured_prompts_are_absorbed_where_that_is_less_work(
    starts: list[int], lengths: list[int], best: GraphSize
) -> None:
    assert best_captured_size([ABSORBING, PLANNED], starts, lengths) == best
    assert best_captured_size([PLANNED], starts, lengths) == PLANNED


@pytest.mark.parametrize(("starts", "lengths", "best"), [([0], [1000], ABSORBING), ([8000], [512], None)])
def test_prompts_that_no_planned_step_has_room_for_are_absorbed_up_to_some_length(
    starts: list[int], lengths: list[int], best: GraphSize | None
) -> None:
    assert best_captured_size([ABSORBING], starts, lengths) == best
    assert best_captured_size([], starts, lengths) is None


@pytest.mark.parametrize(("num_tokens", "is_taken"), [(3840, True), (3839, False)])
def test_a_large_graph_is_taken_by_steps_that_fill_three_quarters_of_it(num_tokens: int, is_taken: bool) -> None:
    large = GraphSize(5120, 65, 32, 0)
    assert (best_captured_size([large], [0], [num_tokens]) == large) == is_taken


@settings(deadline=None, max_examples=50)
@given(
    contexts=st.lists(st.integers(0, 300), min_size=1, max_size=8), limit=st.integers(1, 200), free=st.integers(0, 300)
)
def test_pieces_of_a_captured_step_hold_what_other_pieces_do(contexts: list[int], limit: int, free: int) -> None:
    room = sum(contexts) + free
    given_R = list(even_chunks(np.array(contexts), room, limit))
    assert len(given_R) == -(-room // limit)
    for chunk, cached_R in zip(context_chunks(contexts, limit), given_R, strict=False):
        right_R = np.zeros(len(contexts), dtype=np.int64)
        right_R[chunk.rows] = chunk.lengths
        assert cached_R.tolist() == right_R.tolist()
    assert sum(int(cached_R.sum()) for cached_R in given_R) == sum(contexts)


@settings(deadline=None, max_examples=50)
@given(lengths=st.lists(st.integers(1, 300), max_size=16), rest=st.integers(0, 300))
def test_rows_that_a_captured_step_lacks_share_the_tokens_that_fill_it_up(lengths: list[int], rest: int) -> None:
    length_R = padded_lengths(sum(lengths) + rest, 17, lengths).tolist()
    assert length_R[: len(lengths)] == lengths
    assert sum(length_R) == sum(lengths) + rest
    share = rest / (17 - len(lengths))
    assert all(abs(length - share) <= 1 for length in length_R[len(lengths) :])
