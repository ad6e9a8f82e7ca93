"""Steps of a rank, on a model whose tokens depend on exactly what they could see."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plait_proto import FAILED_ROW, ExitCode, Plan, StepResult, decode, encode
from plait_testing.counting_model import CountingModel, counting_rank, next_token
from plait_testing.stepper import Stepper, words
from plait_worker.attention.backend import StepAttention
from plait_worker.cache import KVCache
from plait_worker.errors import WorkerError
from plait_worker.rank import Rank
from plait_worker.rows import Rows
from torch import Tensor

PAGE = 16


def stepper_over(rank: Rank, num_pages: int = 64) -> Stepper:
    """Plans and results cross the wire's encoding."""

    def compute(plan: Plan) -> StepResult:
        received = decode(encode(plan))
        assert isinstance(received, Plan)
        result = decode(encode(rank.step(received)))
        assert isinstance(result, StepResult)
        return result

    return Stepper(compute, rank.cache.page_size, num_pages)


@pytest.fixture
def counting() -> tuple[Stepper, CountingModel, Rank]:
    rank, model = counting_rank(PAGE)
    return stepper_over(rank), model, rank


Counting = tuple[Stepper, CountingModel, Rank]


def expected_output(prompt: list[int], num_tokens: int) -> list[int]:
    context = list(prompt)
    for _ in range(num_tokens):
        context.append(next_token(context))
    return context[len(prompt) :]


def some_prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(97), k=length)


def test_a_whole_prompt_in_one_step_samples_its_first_token(counting: Counting) -> None:
    stepper, model, _ = counting
    prompt = some_prompt(1, 40)
    slot = stepper.admit(prompt)
    stepper.step(prefill={slot: 40})
    assert stepper.requests[slot].output == expected_output(prompt, 1)
    assert model.num_head_rows == [1]


class BrokenAfter(CountingModel):
    """Computes NaN where a context of more than 20 tokens ends."""

    def forward(self, rows: Rows, cache: KVCache, attention: Sequence[StepAttention]) -> Tensor:
        hidden_TD = super().forward(rows, cache, attention)
        return hidden_TD.where(rows.positions_T[:, None] < 20, torch.nan)


@pytest.mark.parametrize("asked", [{}, {"temperature": 1.0}, {"logprobs": 2}, {"temperature": 1.0, "top_k": 5}])
def test_nan_fails_its_row_and_never_becomes_a_token(asked: dict[str, Any]) -> None:
    rank, _ = counting_rank(PAGE)
    stepper = stepper_over(replace(rank, model=BrokenAfter()))
    sound = stepper.admit(some_prompt(1, 10))
    stepper.step(prefill={sound: 10})
    broken = stepper.admit(some_prompt(2, 40), **asked)
    stepper.step(prefill={broken: 40}, decode=[sound])
    # The next row may be on the wire already.
    stepper.step(decode=[sound, broken])
    assert stepper.requests[broken].output == [FAILED_ROW, FAILED_ROW]
    assert stepper.requests[sound].output == expected_output(some_prompt(1, 10), 3)


def test_a_model_that_computes_nan_from_the_first_step_on_is_named() -> None:
    rank, _ = counting_rank(PAGE)
    rank.check_warm_up(StepResult(0, 1, words([1]), words([7]), b"", b""))
    with pytest.raises(WorkerError, match=r"CountingForCausalLM in float32. computes NaN or infinity") as told:
        rank.check_warm_up(StepResult(0, 1, words([1]), words([FAILED_ROW]), b"", b""))
    assert told.value.code == ExitCode.MODEL_FILES


def test_a_middle_chunk_never_reaches_the_output_head(counting: Counting) -> None:
    stepper, model, _ = counting
    slot = stepper.admit(some_prompt(2, 40))
    stepper.step(prefill={slot: 17})
    stepper.step(prefill={slot: 6})
    assert model.num_head_rows == []
    assert stepper.requests[slot].output == []


def test_the_last_chunk_samples_what_the_whole_prompt_would(counting: Counting) -> None:
    stepper, model, _ = counting
    prompt = some_prompt(3, 40)
    slot = stepper.admit(prompt)
    for length in (17, 6, 16, 1):
        stepper.step(prefill={slot: length})
    assert stepper.requests[slot].output == expected_output(prompt, 1)
    assert model.num_head_rows == [1]


def test_decode_rows_read_the_token_that_stayed_on_the_device(counting: Counting) -> None:
    stepper, _, _ = counting
    prompt = some_prompt(4, 15)
    slot = stepper.admit(prompt)
    stepper.step(prefill={slot: 15})
    for _ in range(30):
        plan = stepper.step(decode=[slot])
        assert len(plan.token_ids) == 0
    assert stepper.requests[slot].output == expected_output(prompt, 31)


def test_the_four_outcomes_of_a_row_in_one_step(counting: Counting) -> None:
    stepper, model, rank = counting
    prompts = [some_prompt(seed, 20 + seed) for seed in range(4)]
    slots = [stepper.admit(prompt) for prompt in prompts]
    stepper.step(prefill={slots[0]: 20, slots[1]: 10})
    model.num_head_rows.clear()
    stepper.step(prefill={slots[1]: 11, slots[2]: 22, slots[3]: 5}, decode=[slots[0]])
    outputs = [stepper.requests[slot].output for slot in slots]
    assert outputs == [expected_output(prompt, num) for prompt, num in zip(prompts, (2, 1, 1, 0), strict=True)]
    assert model.num_head_rows == [3]
    assert rank.totals.num_mixed_steps == 1


@pytest.mark.parametrize("chunk", [1, 7, 16, 64, 2048])
def test_tokens_computed_equal_prompt_tokens_at_every_chunk_size(counting: Counting, chunk: int) -> None:
    stepper, model, rank = counting
    prompt = some_prompt(chunk, 150)
    slot = stepper.admit(prompt)
    assert stepper.generate(slot, num_tokens=1, chunk=chunk) == expected_output(prompt, 1)
    assert model.num_tokens == rank.totals.num_prefill_tokens == 150
    assert model.first_positions == list(range(0, 150, chunk))


@pytest.mark.parametrize("num_own", [0, PAGE, 2 * PAGE])
def test_a_prefill_goes_on_behind_pages_that_another_slot_has_filled(counting: Counting, num_own: int) -> None:
    stepper, model, _ = counting
    prompt = some_prompt(1, 5 * PAGE)
    first, second, decoding = stepper.admit(prompt), stepper.admit([*prompt, 3, 4]), stepper.admit(some_prompt(2, 9))
    stepper.step(prefill={first: 3 * PAGE, decoding: 9} | ({second: num_own} if num_own else {}))
    stepper.adopt(second, first, 3 * PAGE)
    stepper.step(prefill={first: PAGE, second: PAGE}, decode=[decoding])
    assert stepper.generate(second, num_tokens=5, chunk=PAGE) == expected_output([*prompt, 3, 4], 5)
    assert stepper.generate(first, num_tokens=5, chunk=PAGE) == expected_output(prompt, 5)
    assert model.num_tokens == 5 * PAGE + num_own + 2 * PAGE + 2 + 9 + 1 + 8


def test_a_slot_taken_again_forgets_what_it_held(counting: Counting) -> None:
    stepper, _, _ = counting
    slot = stepper.admit(some_prompt(5, 100), temperature=1.0, seed=1)
    stepper.generate(slot, num_tokens=3, chunk=64)
    stepper.free(slot)
    prompt = some_prompt(6, 33)
    assert stepper.admit(prompt, slot=slot) == slot
    assert stepper.generate(slot, num_tokens=20, chunk=10) == expected_output(prompt, 20)


def test_a_slot_can_be_freed_and_taken_in_one_plan_while_others_decode(counting: Counting) -> None:
    stepper, _, _ = counting
    first, second = stepper.admit(some_prompt(7, 30)), stepper.admit(some_prompt(8, 30))
    stepper.step(prefill={first: 30, second: 30})
    stepper.free(first)
    prompt = some_prompt(9, 50)
    stepper.admit(prompt, slot=first)
    stepper.step(prefill={first: 50}, decode=[second])
    stepper.step(decode=[second, first])
    assert stepper.requests[first].output == expected_output(prompt, 2)
    assert stepper.requests[second].output == expected_output(some_prompt(8, 30), 3)


def test_a_plan_that_only_frees_is_answered_with_nothing(counting: Counting) -> None:
    stepper, model, _ = counting
    slot = stepper.admit(some_prompt(1, 5))
    stepper.step(prefill={slot: 5})
    stepper.free(slot)
    computed = model.num_tokens
    stepper.step()
    assert model.num_tokens == computed


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([1, 4, 16, 64]))
def test_any_mix_of_rows_gives_each_request_its_own_tokens(seed: int, page_size: int) -> None:
    draw = random.Random(seed)
    num_pages = -(-8 * 130 // page_size)
    rank, model = counting_rank(page_size, num_pages)
    stepper = stepper_over(rank, num_pages)
    finished = []
    for _ in range(60):
        if len(stepper.requests) < 8 and draw.random() < 0.4:
            stepper.admit(draw.choices(range(97), k=draw.randint(1, 100)))
        prefill, decode = {}, []
        for slot in draw.sample(list(stepper.requests), len(stepper.requests)):
            request = stepper.requests[slot]
            if request.num_left > 0 and (not request.pages or draw.random() < 0.7):
                prefill[slot] = draw.randint(1, request.num_left)
            elif request.num_left == 0 and len(request.output) == 20:
                finished.append(stepper.free(slot))
            elif request.num_left == 0 and draw.random() < 0.8:
                decode.append(slot)
        stepper.step(prefill, decode)
    for request in [*finished, *stepper.requests.values()]:
        assert request.output == expected_output(request.prompt, len(request.output))
    begun = [request for request in [*finished, *stepper.requests.values()] if request.num_computed]
    assert model.first_positions.count(0) == len(begun)


def test_a_seeded_request_samples_the_same_tokens_in_any_batch() -> None:
    alone = []
    settings: list[dict[str, Any]] = [
        {"temperature": 1.5, "seed": 2**64 - 1},
        {"temperature": 0.8, "top_k": 5, "seed": 7},
        {"temperature": 2.0, "top_p": 0.7, "seed": 7},
        {"temperature": 3.0, "min_p": 0.05, "seed": 9},
        {},
    ]
    for index, sampling in enumerate(settings):
        stepper = stepper_over(counting_rank(PAGE)[0])
        slot = stepper.admit(some_prompt(index, 20 + index), **sampling)
        alone.append(list(stepper.generate(slot, num_tokens=12, chunk=7)))
    stepper = stepper_over(counting_rank(PAGE)[0])
    slots = [stepper.admit(some_prompt(i, 20 + i), **sampling) for i, sampling in reversed(list(enumerate(settings)))]
    stepper.step(prefill={slot: stepper.requests[slot].num_left for slot in slots[:3]})
    stepper.step(prefill={slot: stepper.requests[slot].num_left for slot in slots[3:]}, decode=slots[:3])
    for _ in range(11):
        stepper.step(decode=slots)
    together = [stepper.requests[slot].output[:12] for slot in reversed(slots)]
    assert together == alone


def test_the_random_numbers_go_on_after_a_preemption(counting: Counting) -> None:
    stepper, _, _ = counting
    prompt = some_prompt(1, 20)
    slot = stepper.admit(prompt, temperature=2.0, seed=5)
    whole = list(stepper.generate(slot, num_tokens=10, chunk=20))
    stepper.free(slot)
    slot = stepper.admit(prompt + whole[:4], temperature=2.0, seed=5, next_output=4)
    assert stepper.generate(slot, num_tokens=6, chunk=9) == whole[4:]


def test_log_probabilities_come_for_the_rows_that_ask(counting: Counting) -> None:
    stepper, _model, _ = counting
    wants = [None, 0, 3, 5]
    slots = [stepper.admit(some_prompt(seed, 20), logprobs=num) for seed, num in enumerate(wants)]
    stepper.step(prefill=dict.fromkeys(slots, 20))
    stepper.step(decode=slots)
    for slot, num in zip(slots, wants, strict=True):
        request = stepper.requests[slot]
        assert len(request.records) == (0 if num is None else 2)
        for token, record in zip(request.output, request.records, strict=False):
            assert record.rank == 1
            assert len(record.best_ids) == num
            if num:
                assert record.best_ids[0] == token
                assert record.best_logprobs[0] == record.logprob
                assert sorted(record.best_logprobs, reverse=True) == list(record.best_logprobs)


@pytest.mark.parametrize("chunk", [1, 7, 300, 700])
def test_prompt_log_probabilities_come_once_for_each_token_but_the_first(chunk: int) -> None:
    rank, _model = counting_rank(PAGE, num_pages=64, max_model_len=1024)
    stepper = stepper_over(rank)
    prompt = some_prompt(0, 30) if chunk < 100 else some_prompt(0, 700)
    other = stepper.admit(some_prompt(1, 40))
    slot = stepper.admit(prompt, prompt_logprobs=2)
    stepper.step(prefill={other: 40, slot: min(chunk, len(prompt))})
    stepper.generate(slot, num_tokens=2, chunk=chunk)
    records = stepper.requests[slot].prompt_records
    assert len(records) == len(prompt) - 1
    for place, record in enumerate(records, start=1):
        predicted = next_token(prompt[:place])
        distance = abs(predicted - prompt[place])
        assert record.best_ids[0] == predicted
        assert record.best_logprobs[0] - record.logprob == pytest.approx(min(distance, 97 - distance), abs=1e-4)
    assert stepper.requests[slot].output == expected_output(prompt, 2)


def broken(**changes: object) -> Plan:
    """The second step of a request in slot 0 (one page, 10 of 12 prompt tokens computed), with something wrong."""
    parts: dict[str, object] = {
        "step": 2,
        "num_prefill": 1,
        "num_decode": 0,
        "new_slots": (),
        "decision": None,
        "rows": words([0, 10, 2, 1]),
        "token_ids": words([1, 2]),
        "appended_pages": b"",
        "freed_slots": b"",
    }
    return Plan(**{**parts, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"rows": words([0, 0, 2, 1])}, "does not start where"),
        ({"rows": words([0, 11, 2, 1])}, "does not start where"),
        ({"rows": words([0, 16, 2, 1])}, "lacks a page"),
        (
            {
                "num_prefill": 0,
                "num_decode": 1,
                "rows": words([0, 16]),
                "token_ids": b"",
                "appended_pages": words([0, 9]),
            },
            "does not start where",
        ),
        ({"rows": words([3, 0, 2, 1])}, "holds nothing"),
        ({"rows": words([9, 10, 2, 1])}, "slot 9 of 8"),
        ({"rows": words([0, 10, 7, 1]), "token_ids": words([1] * 7)}, "lacks a page"),
        ({"num_prefill": 0, "num_decode": 1, "rows": words([0, 10]), "token_ids": b""}, "not sampled a token"),
        ({"num_decode": 1, "rows": words([0, 10, 2, 1, 0, 12])}, "two rows"),
        ({"token_ids": words([1, 97])}, "outside the model's vocabulary"),
        ({"appended_pages": words([0, 64])}, "page 64 of 64"),
        ({"appended_pages": words([0, 1] * 32)}, "more than the 32 pages"),
        ({"appended_pages": words([5, 1])}, "holds nothing"),
        ({"trimmed_slots": words([0, 0, 1])}, "the plan has drafts"),
        ({"other_pages": words([1, 0, 1])}, "pages of several kinds"),
        ({"freed_slots": words([4])}, "frees a slot that holds nothing"),
        ({"freed_slots": words([0])}, "holds nothing"),
    ],
)
def test_a_plan_that_contradicts_the_slots_is_rejected_with_the_reason(
    counting: Counting, changes: dict[str, object], reason: str
) -> None:
    stepper, _, rank = counting
    slot = stepper.admit(some_prompt(1, 12))
    stepper.step(prefill={slot: 10})
    with pytest.raises(WorkerError, match=reason):
        rank.step(broken(**changes))
