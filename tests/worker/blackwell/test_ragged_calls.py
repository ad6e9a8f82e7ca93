"""Un-absorbed prefill sees every token of its contexts once, in calls that fit."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from plait_worker.attention.mla.ragged_calls import runs_of_context, runs_of_new_tokens

row = st.tuples(st.sampled_from([0, 0, 1, 7, 64, 300]), st.integers(1, 90))


@settings(max_examples=40, deadline=None)
@given(rows=st.lists(row, max_size=9), chunk=st.integers(5, 200), most=st.integers(1, 4))
def test_every_token_is_seen_once_and_in_order(rows: list[tuple[int, int]], chunk: int, most: int) -> None:
    starts, lengths = [start for start, _ in rows], [length for _, length in rows]
    runs = list(runs_of_new_tokens(lengths, lambda num_rows, longest: num_rows <= most))
    assert [index for run in runs for index in run.rows] == list(range(len(rows)))
    seen: list[list[int]] = [[] for _ in rows]
    for run in runs:
        assert len(run.rows) <= most
        assert run.kv_lengths == run.q_lengths == lengths[run.rows.start : run.rows.stop]
        for part in runs_of_context(run, starts, lengths, chunk):
            assert 0 < sum(part.kv_lengths) <= chunk
            assert part.kv_lengths[0] > 0 < part.kv_lengths[-1]
            assert part.tokens == slice(sum(lengths[: part.rows.start]), sum(lengths[: part.rows.stop]))
            assert part.q_lengths == lengths[part.rows.start : part.rows.stop]
            assert part.seen is not None
            assert part.seen.rows == slice(part.rows.start, part.rows.stop)
            for index, begin, num in zip(part.rows, part.seen.begins, part.kv_lengths, strict=True):
                seen[index] += range(begin, begin + num)
    assert seen == [list(range(start)) for start in starts]


def test_one_row_that_does_not_fit_goes_alone() -> None:
    runs = list(runs_of_new_tokens([5, 900, 4], lambda num_rows, longest: longest < 100))
    assert [list(run.rows) for run in runs] == [[0], [1], [2]]
