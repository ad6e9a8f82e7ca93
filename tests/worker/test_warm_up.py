"""Warm-up steps cover what requests need, so that none waits for a kernel's first use."""

from __future__ import annotations

import pytest
from plait_testing.counting_model import counting_rank
from plait_testing.stepper import Stepper
from plait_worker.warm_up import StepLimits, warm_up_steps

PAGE = 16
LIMITS = [StepLimits(8192, 256, 32_768), StepLimits(160, 4, 300), StepLimits(3, 2, 5), StepLimits(1, 1, 1)]


@pytest.mark.parametrize("limits", LIMITS)
def test_usual_steps_keep_the_settings_limits(limits: StepLimits) -> None:
    for inputs in warm_up_steps(limits):
        assert 1 <= inputs.num_tokens <= limits.max_tokens
        assert 1 <= inputs.num_prefill <= len(inputs.slots_R) <= limits.max_slots
        assert len(set(inputs.slots_R.tolist())) == len(inputs.slots_R)
        assert inputs.lengths_R.min() >= 1
        assert inputs.starts_R.min() >= 0
        assert (inputs.starts_R + inputs.lengths_R).max() <= limits.max_context
        assert len(inputs.token_ids) == inputs.lengths_R[: inputs.num_prefill].sum()


def test_usual_steps_differ_in_all_that_kernels_are_chosen_by() -> None:
    steps = list(warm_up_steps(LIMITS[0]))
    decode_rows = [len(inputs.slots_R) - inputs.num_prefill for inputs in steps]
    assert min(decode_rows) == 0
    assert max(decode_rows) > 100
    assert {inputs.num_prefill for inputs in steps} == {1, 2, 3}
    contexts = [start for inputs in steps for start in inputs.starts_R[: inputs.num_prefill].tolist()]
    for least in (0, 1, 16, 128, 1024, 4096):
        assert any(least <= context < 2 * least + 1 for context in contexts), least
    chunks = [length for inputs in steps for length in inputs.lengths_R[: inputs.num_prefill].tolist()]
    for least in (1, 16, 128, 1024):
        assert any(least <= chunk < 2 * least for chunk in chunks), least


def test_steps_that_were_tried_change_no_answer() -> None:
    untouched, _ = counting_rank(PAGE)
    tried, model = counting_rank(PAGE)
    for inputs in warm_up_steps(LIMITS[1]):
        tried.try_step(inputs)
    assert model.num_tokens > 0
    one, other = (Stepper(rank.step, PAGE, 64) for rank in (untouched, tried))
    assert generate(one) == generate(other)


def generate(stepper: Stepper) -> list[int]:
    return stepper.generate(stepper.admit(range(40)), 12, chunk=16)
