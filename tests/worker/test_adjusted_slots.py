"""What a request changes about its logits holds for each of its tokens, and for no other request's."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from plait_proto import Adjustment, NewSlot, read_adjustments
from plait_worker.errors import WorkerError
from plait_worker.sample import sample
from plait_worker.sampling_table import SamplingTable

Floats = NDArray[np.float64]
VOCAB = 40
CPU = torch.device("cpu")


@dataclass
class Asked:
    """A request's changes, as a record of the wire has them."""

    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0
    min_tokens: int = 0
    prompt: Sequence[int] = ()
    output: Sequence[int] = ()
    bias: dict[int, float] = field(default_factory=dict)
    allowed: Sequence[int] = ()
    ends: Sequence[int] = ()
    bad_words: Sequence[Sequence[int]] = ()

    def record(self, slot: int) -> Adjustment:
        counts = [len(it) for it in (self.prompt, self.output, self.bias, self.allowed, self.ends, self.bad_words)]
        head = struct.pack("<I3fI6I", slot, self.presence, self.frequency, self.repetition, self.min_tokens, *counts)
        pairs = b"".join(struct.pack("<If", id, bias) for id, bias in self.bias.items())
        bad_words = [word for ids in self.bad_words for word in (len(ids), *ids)]
        words = head + _words(*self.prompt, *self.output) + pairs + _words(*self.allowed, *self.ends, *bad_words)
        (read,) = read_adjustments(memoryview(words).cast("I"))
        return read


def _words(*ids: int) -> bytes:
    return struct.pack(f"<{len(ids)}I", *ids)


def new_slot(slot: int, next_output: int = 0, temperature: float = 0.0, seed: int = 0) -> NewSlot:
    return NewSlot(slot, next_output, temperature, 0, 1.0, 0.0, seed, None, None)


class Table:
    """Slots that sample from logits that a test gives."""

    def __init__(self) -> None:
        self.table = SamplingTable(6, VOCAB, CPU)

    def admit(self, slot: int, asked: Asked | None = None, next_output: int = 0) -> None:
        records = [] if asked is None else [asked.record(slot)]
        self.table.release(np.array([slot]))
        self.table.assign([new_slot(slot, next_output)], records)

    def step(self, logits: torch.Tensor, slots: Sequence[int]) -> list[int]:
        """The tokens of one step, counted."""
        host, device = np.array(slots, dtype=np.int64), torch.tensor(slots)
        ids = sample(logits.clone(), host, device, self.table)
        self.table.count_output(device)
        self.table.count_adjusted(host, ids)
        return ids.tolist()


def falling(num_rows: int = 1) -> torch.Tensor:
    """The lowest id is the best, each next one 0.1 worse."""
    return torch.linspace(4, 4.1 - 0.1 * VOCAB, VOCAB).repeat(num_rows, 1)


def generated(asked: Asked, num: int, logits: torch.Tensor | None = None) -> list[int]:
    table = Table()
    table.admit(2, asked)
    return [table.step(falling() if logits is None else logits, [2])[0] for _ in range(num)]


def test_penalties_count_what_was_sampled() -> None:
    assert generated(Asked(), 4) == [0, 0, 0, 0]
    assert generated(Asked(presence=0.15), 5) == [0, 1, 0, 0, 0]
    assert generated(Asked(frequency=0.16), 6) == [0, 1, 0, 2, 1, 3]
    assert generated(Asked(repetition=1.06), 4) == [0, 1, 2, 0]


def test_only_the_repetition_penalty_counts_the_prompt() -> None:
    assert generated(Asked(repetition=1.06, prompt=[0, 1]), 2) == [2, 0]
    assert generated(Asked(presence=1.0, prompt=[0, 1]), 1) == [0]


@pytest.mark.parametrize(
    "asked",
    [
        Asked(presence=0.15, frequency=0.05),
        Asked(repetition=1.07, prompt=[1, 3]),
        Asked(min_tokens=5, ends=[0, 1]),
        Asked(bad_words=[[0, 0], [0, 1, 0], [2]], frequency=0.04),
    ],
    ids=str,
)
@pytest.mark.parametrize("num_before", [1, 4, 7])
def test_the_output_that_a_preempted_request_brings_changes_no_token(asked: Asked, num_before: int) -> None:
    whole = generated(asked, 12)
    table = Table()
    table.admit(0, Asked(presence=2.0))  # has the rows of others
    table.admit(3, replace(asked, output=whole[:num_before]), next_output=num_before)
    assert [table.step(falling(), [3])[0] for _ in range(12 - num_before)] == whole[num_before:]


def float64_token(logits: Floats, asked: Asked, counts: Floats) -> tuple[int, bool]:
    """The best token, and whether float32 may take another for it; ``counts`` are those of the output."""
    seen = counts > 0
    adjusted = logits - asked.frequency * counts - asked.presence * seen
    repeated = seen.copy()
    repeated[list(asked.prompt)] = True
    adjusted += np.where(
        repeated, np.where(logits > 0, logits / asked.repetition, logits * asked.repetition) - logits, 0
    )
    for token, bias in asked.bias.items():
        adjusted[token] += bias
    second, best = np.argsort(adjusted, kind="stable")[-2:]
    return int(best), bool(adjusted[best] - adjusted[second] < 1e-6 * (10 + np.abs(adjusted).max()))


@pytest.mark.acceptance("cpu")
def test_the_tokens_of_long_outputs_are_those_of_float64(sized: Callable[[int, int], int]) -> None:
    """Each row with penalties, a prompt and biases of its own; a tie within float32's rounding decides nothing."""
    drawn, slots = np.random.default_rng(25), list(range(6))
    table, asked = Table(), list[Asked]()
    for slot in slots:
        presence, frequency = (float(np.float32(drawn.uniform(-2, 2))) for _ in range(2))
        prompt = drawn.integers(0, VOCAB, 20).tolist()
        bias = {int(token): float(np.float32(drawn.normal())) for token in drawn.choice(VOCAB, 5, replace=False)}
        # A frequency penalty below zero repeats one token for good; above, the counts decide more with every token.
        one = Asked(presence, abs(frequency) / 50, float(np.float32(drawn.uniform(0.8, 1.5))), prompt=prompt, bias=bias)
        asked.append(one)
        table.admit(slot, one)
    counts = np.zeros((len(slots), VOCAB))
    num_steps, num_close = sized(600, 100_000) // len(slots) + 1, 0
    for _ in range(num_steps):
        logits = torch.from_numpy(drawn.normal(0, 4, (len(slots), VOCAB)).astype(np.float32))
        for slot, token in zip(slots, table.step(logits, slots), strict=True):
            best, is_close = float64_token(logits[slot].double().numpy(), asked[slot], counts[slot])
            assert token == best or is_close
            num_close += is_close
            counts[slot, token] += 1
    assert num_close <= 0.001 * num_steps * len(slots)
    assert ((counts > 0).sum(1) > VOCAB // 2).all()


def test_biases_are_added_and_allowed_tokens_are_the_only_ones() -> None:
    assert generated(Asked(bias={7: 3.0}), 1) == [7]
    assert generated(Asked(bias={0: -100.0, 1: -100.0}), 1) == [2]
    assert generated(Asked(allowed=[9, 5]), 1) == [5]
    assert generated(Asked(allowed=[9, 5], bias={9: 1.0, 3: 100.0}), 1) == [9]
    assert generated(Asked(allowed=[9, 5], frequency=0.3), 3) == [5, 5, 9]


def test_ends_are_closed_until_the_output_is_long_enough() -> None:
    assert generated(Asked(min_tokens=3, ends=[0, 1]), 5) == [2, 2, 2, 0, 0]


def test_bad_words_are_left_before_their_last_token() -> None:
    assert generated(Asked(bad_words=[[0]]), 2) == [1, 1]
    assert generated(Asked(bad_words=[[0, 0]]), 4) == [0, 1, 0, 1]
    assert generated(Asked(bad_words=[[0, 0, 0], [0, 0, 1]]), 4) == [0, 0, 2, 0]


def test_a_row_with_nothing_open_still_has_a_token_that_is_allowed() -> None:
    asked = Asked(allowed=[5, 6], bad_words=[[5, 5], [5, 6]])
    assert generated(asked, 3) == [5, 5, 5]


def test_rows_beside_those_that_ask_keep_their_tokens() -> None:
    """Greedy and random rows, with changes and without, in one step as alone."""
    asked = {0: Asked(frequency=0.3), 1: None, 2: Asked(bias={4: 2.0}), 3: None}
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(1))

    def run(groups: list[list[int]]) -> dict[int, list[int]]:
        table = Table()
        for slot, changes in asked.items():
            records = [] if changes is None else [changes.record(slot)]
            table.table.assign([new_slot(slot, temperature=0.9 * (slot >= 2), seed=slot)], records)
        given: dict[int, list[int]] = {slot: [] for slot in asked}
        for _ in range(8):
            for slots in groups:
                for slot, token in zip(slots, table.step(logits[slots], slots), strict=True):
                    given[slot].append(token)
        return given

    assert run([[0, 1, 2, 3]]) == run([[3], [2], [0], [1]]) == run([[2, 0], [1, 3]])


def test_rows_are_given_back_and_given_out_clean() -> None:
    table = Table()
    for round_ in range(20):
        for slot in range(6):
            table.admit(slot, Asked(presence=2.0, output=[round_]))
            table.step(falling(), [slot])
    assert len(table.table.adjusted) == 6
    for slot in range(6):
        table.admit(slot)
    assert len(table.table.adjusted) == 0
    table.admit(0, Asked(presence=0.05))
    assert table.step(falling(), [0]) == [0]


def test_what_cannot_be_is_refused() -> None:
    table = Table()
    for broken in (Asked(bias={VOCAB: 1.0}), Asked(prompt=[VOCAB]), Asked(bad_words=[[1] * 17])):
        with pytest.raises(WorkerError):
            table.admit(0, broken)
    with pytest.raises(WorkerError, match="slot 4"):
        table.table.assign([new_slot(3)], [Asked().record(4)])
    with pytest.raises(WorkerError, match="twice"):
        table.table.assign([new_slot(3)], [Asked().record(3), Asked().record(3)])
