"""Which steps of prompts and decode rows go by one call: those that the recorded figures say are faster so."""

import json

import pytest
import torch
from bench.gpu.mixed_kernel import kinds, table
from plait_worker.attention.mha.mixed_kernel import TABLE, kind_of, prefers_mixed_kernel
from plait_worker.attention.spec import MhaShape
from plait_worker.rows import Rows

SHAPE = MhaShape(32, 8, 128, 128**-0.5, torch.bfloat16)


def rows_of(prompts: list[int], kv_lengths: list[int]) -> Rows:
    lengths = [*prompts, *[1] * len(kv_lengths)]
    none = torch.zeros(0)
    starts = [5] * len(prompts) + [kv_length - 1 for kv_length in kv_lengths]
    return Rows(len(prompts), list(range(len(lengths))), starts, lengths, none, none, none, none)


def measured(whole: float, split: float, case: str) -> list[dict[str, object]]:
    return [
        {"case": case, "metric": metric, "unit": "us", "value": us} for metric, us in (("one", whole), ("two", split))
    ]


def test_a_step_counts_as_the_next_larger_that_was_measured() -> None:
    assert kind_of(rows_of([64], [128])) == (1, 64, 128)
    assert kind_of(rows_of([65, 3], [100, 157])) == (4, 256, 1024)
    assert kind_of(rows_of([4096], [8000] * 256)) == (256, 4096, 8192)


@pytest.mark.parametrize("rows", [([], [9]), ([9], []), ([4097], [9]), ([9], [9] * 257), ([9], [8193])])
def test_rows_of_one_sort_and_larger_steps_are_of_no_kind(rows: tuple[list[int], list[int]]) -> None:
    assert kind_of(rows_of(*rows)) is None


def test_few_shallow_rows_go_with_the_prompt_and_many_or_deep_ones_do_not() -> None:
    assert prefers_mixed_kernel("flashinfer", SHAPE, rows_of([200], [128, 90]))
    assert not prefers_mixed_kernel("flashinfer", SHAPE, rows_of([200], [128] * 16))
    assert not prefers_mixed_kernel("flashinfer", SHAPE, rows_of([200], [90, 8000]))
    assert not prefers_mixed_kernel("trtllm_mha", SHAPE, rows_of([200], [128, 90]))


def test_groups_wider_than_the_measured_ones_are_split() -> None:
    wide = MhaShape(128, 8, 128, 128**-0.5, torch.bfloat16)
    assert not prefers_mixed_kernel("flashinfer", wide, rows_of([200], [128, 90]))


def test_a_kind_is_taken_where_it_is_faster_by_more_than_noise_and_slower_in_no_case() -> None:
    here, there = (f"heads 32/8: 4 decode rows at 128, prompts 256 behind {context}" for context in (0, 4096))
    assert kinds([*measured(9.0, 10.0, here), *measured(9.5, 10.0, there)], "one", "two") == [(4, 256, 128)]
    assert kinds([*measured(8.0, 10.0, here), *measured(10.1, 10.0, there)], "one", "two") == []
    assert kinds(measured(9.9, 10.0, here), "one", "two") == []


def test_the_table_is_what_the_recorded_figures_say() -> None:
    written = {backend: [tuple(kind) for kind in of_one] for backend, of_one in json.loads(TABLE.read_text()).items()}
    assert written == table()
