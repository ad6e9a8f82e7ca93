"""What a GPU computes at start so that no request waits for a kernel's first use."""

from __future__ import annotations

import pytest
from counting_model import counting_rank
from plait_worker.usual_steps import StepLimits, usual_steps
from stepper import Stepper

PAGE = 16
LIMITS = [StepLimits(8192, 256, 32_768), StepLimits(160, 4, 300), StepLimits(3, 2, 5), StepLimits(1, 1, 1)]


@pytest.mark.parametrize("limits", LIMITS)
def test_usual_steps_keep_the_settings_limits(limits: StepLimits) -> None:
    for delta in usual_steps(limits):
        assert 1 <= delta.num_tokens <= limits.max_tokens
        assert 1 <= delta.num_prefill <= len(delta.slots_R) <= limits.max_slots
        assert len(set(delta.slots_R.tolist())) == len(delta.slots_R)
        assert delta.lengths_R.min() >= 1
        assert delta.starts_R.min() >= 0
        assert (delta.starts_R + delta.lengths_R).max() <= limits.max_context
        assert len(delta.token_ids) == delta.lengths_R[: delta.num_prefill].sum()


def test_usual_steps_differ_in_all_that_kernels_are_chosen_by() -> None:
    steps = list(usual_steps(LIMITS[0]))
    decode_rows = [len(delta.slots_R) - delta.num_prefill for delta in steps]
    assert min(decode_rows) == 0
    assert max(decode_rows) > 100
    assert {delta.num_prefill for delta in steps} == {1, 2, 3}
    contexts = [start for delta in steps for start in delta.starts_R[: delta.num_prefill].tolist()]
    for least in (0, 1, 16, 128, 1024, 4096):
        assert any(least <= context < 2 * least + 1 for context in contexts), least
    chunks = [length for delta in steps for length in delta.lengths_R[: delta.num_prefill].tolist()]
    for least in (1, 16, 128, 1024):
        assert any(least <= chunk < 2 * least for chunk in chunks), least


def test_steps_that_were_tried_change_no_answer() -> None:
    untouched, _ = counting_rank(PAGE)
    tried, model = counting_rank(PAGE)
    for delta in usual_steps(LIMITS[1]):
        tried.try_step(delta)
    assert model.num_tokens > 0
    one, other = (Stepper(rank.step, PAGE, 64) for rank in (untouched, tried))
    assert generate(one) == generate(other)


def generate(stepper: Stepper) -> list[int]:
    return stepper.generate(stepper.admit(range(40)), 12, chunk=16)
