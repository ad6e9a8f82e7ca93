"""Masks come after the forward: who has one samples under it, and who lacks one is left out and loses nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from plait_proto import IS_LAST_CHUNK, ForwardDone, NewSlot, Plan, StepMasks, StepResult, decode
from plait_testing.counting_model import VOCAB, counting_rank, next_token
from plait_testing.stepper import words
from plait_worker.errors import WorkerError
from plait_worker.loop import _StepsInFlight
from plait_worker.rank import Rank

PAGE, NUM_WORDS = 4, -(-VOCAB // 32)
PROMPTS = [[5, 7, 11], [2, 3, 60, 1]]


def expected_output(prompt: list[int], num_tokens: int) -> list[int]:
    """Greedy, without masks."""
    known = list(prompt)
    for _ in range(num_tokens):
        known.append(next_token(known))
    return known[len(prompt) :]


def plan(step: int, rows: Sequence[int], *, awaits_masks: bool = True, **changes: Any) -> Plan:
    """A step of decode rows, ``slot, start`` each, unless more is said."""
    fields: dict[str, Any] = {
        "num_prefill": 0,
        "token_ids": b"",
        "appended_pages": b"",
        "freed_slots": b"",
        "new_slots": (),
    } | changes
    num_decode = (len(rows) - 4 * fields["num_prefill"]) // 2
    return Plan(step=step, num_decode=num_decode, rows=words(rows), awaits_masks=awaits_masks, decision=None, **fields)


def first_plan(**changes: Any) -> Plan:
    """Both prompts, whole, with three pages each."""
    rows = [word for slot, prompt in enumerate(PROMPTS) for word in (slot, 0, len(prompt), IS_LAST_CHUNK)]
    new_slots = tuple(NewSlot(slot, 0, 0.0, 0, 1.0, 0.0, 0, None, None) for slot in (0, 1))
    return plan(
        1,
        rows,
        num_prefill=2,
        token_ids=words([token for prompt in PROMPTS for token in prompt]),
        appended_pages=words([word for page in range(6) for word in (page // 3, page)]),
        new_slots=new_slots,
        **changes,
    )


def masks(
    step: int,
    masked: Sequence[int] = (),
    left_out: Sequence[int] = (),
    *,
    is_last: bool = True,
    **allowed: Sequence[int],
) -> StepMasks:
    """New masks are given as ``m4=[...]``: number 4 allows these tokens."""
    new: list[int] = []
    for name, tokens in allowed.items():
        bits = sum(1 << token for token in tokens)
        new += [int(name[1:]), *(bits >> (32 * word) & 0xFFFFFFFF for word in range(NUM_WORDS))]
    return StepMasks(step, is_last, NUM_WORDS, words(masked), words(left_out), words(new))


def tokens(result: StepResult) -> list[list[int]]:
    """Of each row that samples."""
    ids = np.frombuffer(result.token_ids, dtype="<u4").tolist()
    return [[ids.pop(0) for _ in range(num)] for num in np.frombuffer(result.num_accepted, dtype="<u4").tolist()]


@pytest.fixture
def rank() -> Rank:
    return counting_rank(PAGE)[0]


@pytest.fixture
def step(rank: Rank) -> Callable[..., list[list[int]]]:
    def step(plan: Plan, *messages: StepMasks) -> list[list[int]]:
        return tokens(rank.sample(rank.launch_forward(plan), messages).result())

    return step


Step = Callable[..., list[list[int]]]
FIRST = [next_token(prompt) for prompt in PROMPTS]


def test_a_row_samples_the_best_token_of_its_mask_and_others_any(step: Step) -> None:
    forbidden = FIRST[0]
    allowed = [token for token in range(VOCAB) if token != forbidden]
    assert step(first_plan(), masks(1, [0, 0, 3], m3=allowed))[1] == [FIRST[1]]
    forced = step(plan(2, [0, 3, 1, 4]), masks(2, [0, 0, 4, 1, 0, 3], m4=[50]))
    assert forced[0] == [50]
    assert forced[1] == expected_output(PROMPTS[1], 2)[1:]


def test_a_mask_is_kept_under_its_number_until_another_gets_it(step: Step) -> None:
    assert step(first_plan(), masks(1, [0, 0, 7, 1, 0, 7], m7=[50])) == [[50], [50]]
    assert step(plan(2, [0, 3, 1, 4]), masks(2, [0, 0, 7, 1, 0, 7])) == [[50], [50]]
    assert step(plan(3, [0, 4, 1, 5]), masks(3, [0, 0, 7, 1, 0, 7], m7=[51])) == [[51], [51]]


def test_the_masks_of_a_step_may_come_in_several_messages(step: Step) -> None:
    parts = masks(1, [0, 0, 1], is_last=False, m1=[40]), masks(1, [1, 0, 2], m2=[41])
    assert step(first_plan(), *parts) == [[40], [41]]


def test_rows_that_are_all_free_sample_as_without_masks(step: Step, rank: Rank) -> None:
    assert step(first_plan(), masks(1)) == [[token] for token in FIRST]
    free = rank.launch(plan(2, [0, 3, 1, 4], awaits_masks=False)).result()
    assert tokens(free) == [expected_output(prompt, 2)[1:] for prompt in PROMPTS]


def test_a_row_that_is_left_out_gets_its_token_later_and_others_go_on(step: Step) -> None:
    step(first_plan(), masks(1))
    expected = [expected_output(prompt, 5) for prompt in PROMPTS]
    assert step(plan(2, [0, 3, 1, 4]), masks(2, [], [1])) == [[expected[0][1]], []]
    # The row behind it was on the wire.
    assert step(plan(3, [0, 4, 1, 5]), masks(3, [], [1])) == [[expected[0][2]], []]
    again = step(plan(4, [0, 5, 1, 4]), masks(4))
    assert again == [[expected[0][3]], [expected[1][1]]]
    assert step(plan(5, [0, 6, 1, 5]), masks(5)) == [[expected[0][4]], [expected[1][2]]]


def test_a_prompt_without_its_mask_computes_its_last_token_again(step: Step) -> None:
    assert step(first_plan(), masks(1, [], [1])) == [[FIRST[0]], []]
    assert step(plan(2, [0, 3, 1, 4]), masks(2, [], [1])) == [expected_output(PROMPTS[0], 2)[1:], []]
    rows = [1, 3, 1, IS_LAST_CHUNK, 0, 4]
    again = step(plan(3, rows, num_prefill=1, token_ids=words(PROMPTS[1][3:])), masks(3))
    assert again == [[FIRST[1]], expected_output(PROMPTS[0], 3)[2:]]


def test_all_rows_may_be_left_out(step: Step) -> None:
    assert step(first_plan(), masks(1, [], [0, 1])) == [[], []]


def test_a_slot_that_a_new_request_takes_forgets_that_its_row_was_left_out(step: Step, rank: Rank) -> None:
    step(first_plan(), masks(1, [], [0, 1]))
    freed = first_plan(freed_slots=words([0, 1]))
    assert step(freed, masks(1)) == [[token] for token in FIRST]
    step(plan(2, [0, 3, 1, 4]), masks(2))
    assert not rank.slots._left_out


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (masks(1, [0, 0, 9]), "never sent"),
        (masks(1, [2, 0, 1], m1=[1]), "beyond the 2"),
        (masks(1, [], [2]), "beyond the 2"),
        (masks(1, [0, 1, 1], m1=[1]), "drafts"),
        (StepMasks(1, True, 1, words([]), words([]), words([0, 1])), "1 words"),
        (masks(1, m70000=[1]), "70000"),
    ],
)
def test_masks_that_fit_no_row_are_the_engines_fault(step: Step, wrong: StepMasks, reason: str) -> None:
    with pytest.raises(WorkerError, match=reason):
        step(first_plan(), wrong)


def test_a_token_behind_one_that_was_not_sampled_is_the_engines_fault(step: Step) -> None:
    step(first_plan(), masks(1))
    step(plan(2, [0, 3, 1, 4]), masks(2, [], [1]))
    with pytest.raises(WorkerError, match="behind one that did not"):
        step(plan(3, [0, 4, 1, 5]), masks(3))


class RecordingLink:
    """The worker's end of the wire, without one."""

    def __init__(self) -> None:
        self.sent: list[object] = []
        self.waiting = False

    def send(self, frames: list[bytes]) -> None:
        self.sent.append(decode(frames))

    def finished(self, step: int) -> None:
        pass

    def has_message(self) -> bool:
        return self.waiting

    def told(self) -> list[str]:
        """What was sent, in short."""
        said = [f"{type(message).__name__} {cast('Any', message).step}" for message in self.sent]
        self.sent.clear()
        return said


def steps_in_flight(rank: Rank) -> tuple[_StepsInFlight, RecordingLink]:
    link = RecordingLink()
    return _StepsInFlight(cast("Any", link), rank), link


def test_an_earlier_step_is_answered_and_later_plans_wait_while_masks_are_awaited(rank: Rank) -> None:
    loop, link = steps_in_flight(rank)
    loop.take(first_plan(awaits_masks=False))
    loop.take(plan(2, [0, 3, 1, 4]))
    loop.take(plan(3, [0, 4, 1, 5], awaits_masks=False))
    assert loop.complete_finished() is None, "nothing to look for until the masks come"
    assert link.told() == ["StepResult 1", "ForwardDone 2"]
    loop.complete_finished()
    assert link.told() == [], "told once"
    loop.take(masks(2))
    loop.complete_finished()
    assert link.told() == ["StepResult 2", "StepResult 3"]


def test_a_step_is_answered_before_the_forward_behind_it_whose_masks_follow_from_it(rank: Rank) -> None:
    told: list[str] = []

    def launch_forward(plan: Plan) -> Any:
        told.append(f"{link.told()}, then forward {plan.step}")
        return rank.launch_forward(plan)

    watched = SimpleNamespace(
        launch_forward=launch_forward, sample=rank.sample, sends_result=rank.sends_result, parallel=rank.parallel
    )
    loop, link = steps_in_flight(cast("Rank", watched))
    loop.take(first_plan())
    loop.take(plan(2, [0, 3, 1, 4]))
    loop.take(masks(1))
    assert told == ["[], then forward 1", "['StepResult 1'], then forward 2"]


def test_masks_that_are_here_before_their_plan_is_launched_are_used(rank: Rank) -> None:
    loop, link = steps_in_flight(rank)
    loop.take(first_plan())
    loop.take(plan(2, [0, 3, 1, 4]))
    loop.take(masks(1, is_last=False))
    loop.take(masks(2))
    loop.take(masks(1))
    loop.complete_finished()
    assert link.told() == ["StepResult 1", "StepResult 2"]


def test_the_engine_is_not_asked_for_masks_that_may_be_in_the_inbox(rank: Rank) -> None:
    loop, link = steps_in_flight(rank)
    loop.take(first_plan())
    link.waiting = True
    loop.complete_finished()
    assert link.told() == []


def test_only_the_first_rank_says_that_its_forward_is_done() -> None:
    rank = counting_rank(PAGE)[0]
    second = cast("Rank", SimpleNamespace(launch_forward=rank.launch_forward, sends_result=lambda _plan: False))
    loop, link = steps_in_flight(second)
    loop.take(first_plan())
    loop.complete_finished()
    assert link.told() == []
    assert ForwardDone(1).step == 1
