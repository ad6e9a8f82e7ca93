"""A rank's step in a group: graphs as the decision says, and a dummy row without requests."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from plait_proto import Decision, ExitCode, Mode, Plan, StepResult
from plait_testing.attention_cases import cpu_attention
from plait_testing.counting_model import CountingModel, counting_rank
from plait_testing.stepper import Stepper
from plait_testing.tiny_models import VOCAB, save_tiny_llama
from plait_worker.cache import KVCache
from plait_worker.errors import WorkerError
from plait_worker.graph_sizes import GraphSize
from plait_worker.graphs import StepGraphs
from plait_worker.models.loader import load_model
from plait_worker.parallel import Parallel
from plait_worker.rank import Rank
from plait_worker.slots import Slots
from plait_worker.step_inputs import StepInputs
from torch import Tensor

PAGE, NUM_PAGES = 16, 64
PADDED = 48


def decision(step: int, pad_tokens: int, graph_bucket: int | None = None) -> Decision:
    return Decision(step, Mode.DECODE, pad_tokens, graph_bucket, b"", stop=False, draining=False)


def agreed(rank: Rank, pad_tokens: int, graph_bucket: int | None = None) -> Callable[[Plan], StepResult]:
    """Steps whose decision says so."""

    def compute(plan: Plan) -> StepResult:
        said = decision(plan.step, pad_tokens, graph_bucket)
        return rank.step(msgspec.structs.replace(plan, decision=said))

    return compute


def dummy_plan(step: int, pad_tokens: int, graph_bucket: int | None = None) -> Plan:
    """What the engine of a replica without rows sends."""
    return Plan(
        step=step,
        num_prefill=0,
        num_decode=0,
        new_slots=(),
        decision=decision(step, pad_tokens, graph_bucket),
        rows=b"",
        token_ids=b"",
        appended_pages=b"",
        freed_slots=b"",
    )


def outputs(stepper: Stepper, vocab: int) -> list[list[int]]:
    """Two prompts, of which one is computed while the other decodes."""
    draw = random.Random(7)
    first = stepper.admit(draw.choices(range(vocab), k=20))
    stepper.step(prefill={first: 20})
    second = stepper.admit(draw.choices(range(vocab), k=33))
    stepper.step(prefill={second: 17}, decode=[first])
    stepper.step(prefill={second: 16}, decode=[first])
    for _ in range(4):
        stepper.step(decode=[first, second])
    return [stepper.requests[slot].output for slot in (first, second)]


def test_without_a_graph_a_replica_computes_its_own_rows_and_no_others() -> None:
    (rank, model), (alone, _) = counting_rank(PAGE), counting_rank(PAGE)
    expected = outputs(Stepper(alone.step, PAGE, NUM_PAGES), 97)
    assert outputs(Stepper(agreed(rank, PADDED), PAGE, NUM_PAGES), 97) == expected
    assert model.num_tokens == 20 + 18 + 17 + 8
    assert model.num_dummy_tokens == 0
    pages, pages_alone = rank.cache.layers[0], alone.cache.layers[0]
    assert torch.equal(pages[:NUM_PAGES], pages_alone[:NUM_PAGES])


def test_a_dummy_row_is_run_on_the_dummy_page_and_returns_nothing() -> None:
    rank, model = counting_rank(PAGE)
    rank.cache.layers[0].fill_(3.0)
    result = rank.step(dummy_plan(1, 5))
    assert (result.step, result.num_accepted, result.token_ids, result.logprobs) == (1, b"", b"", b"")
    assert (model.num_tokens, model.num_dummy_tokens, model.num_head_rows) == (1, 1, [])
    assert (rank.cache.layers[0][:NUM_PAGES] == 3.0).all()
    assert (rank.totals.num_decode_rows, rank.totals.num_head_rows) == (0, 0)


def test_dummy_steps_between_a_requests_steps_change_nothing() -> None:
    (rank, _), (alone, _) = counting_rank(PAGE), counting_rank(PAGE)
    compute = agreed(rank, PADDED)

    def with_dummies(plan: Plan) -> StepResult:
        rank.step(dummy_plan(plan.step, 3))
        return compute(plan)

    expected = outputs(Stepper(alone.step, PAGE, NUM_PAGES), 97)
    assert outputs(Stepper(with_dummies, PAGE, NUM_PAGES), 97) == expected


def test_compiled_attention_takes_a_dummy_row(tmp_path: Path) -> None:
    save_tiny_llama(tmp_path)
    ranks = [tiny_rank(tmp_path) for _ in range(2)]
    expected = outputs(Stepper(ranks[0].step, PAGE, NUM_PAGES), VOCAB)
    assert outputs(Stepper(agreed(ranks[1], PADDED), PAGE, NUM_PAGES), VOCAB) == expected
    before = [layer[:NUM_PAGES].clone() for layer in ranks[1].cache.layers]
    ranks[1].step(dummy_plan(100, 4))
    assert all(torch.equal(layer[:NUM_PAGES], old) for layer, old in zip(ranks[1].cache.layers, before, strict=True))


def tiny_rank(folder: Path) -> Rank:
    cpu = torch.device("cpu")
    model = load_model(folder, "float32", cpu, Parallel(), 1 << 40, None)
    return Rank(
        model=model,
        cache=KVCache(model.cache_specs, NUM_PAGES, PAGE, cpu),
        attention=cpu_attention(model.attention_specs, PAGE, PAGE),
        slots=Slots(8, NUM_PAGES, PAGE, 256, cpu),
        parallel=Parallel(),
    )


@dataclasses.dataclass
class Recorded:
    """A graph that notes what it replays: a CPU captures none."""

    size: GraphSize
    rows: list[int] = dataclasses.field(default_factory=list)

    def replay(self, inputs: StepInputs) -> Tensor:
        self.rows.append(len(inputs.slots_R))
        return torch.zeros(int(inputs.samples_R.sum()), 97)

    def sample(self, num: int) -> Tensor:
        return torch.zeros(num, dtype=torch.int32)


def with_graphs(*sizes: int) -> tuple[Rank, CountingModel, list[Recorded]]:
    rank, model = counting_rank(PAGE)
    graphs = [Recorded(GraphSize(0, 0, size)) for size in sizes]
    return dataclasses.replace(rank, graphs=StepGraphs(graphs)), model, graphs  # type: ignore[arg-type]


def test_the_decision_and_nothing_else_chooses_the_graph() -> None:
    rank, _, graphs = with_graphs(1, 4, 8)
    stepper = Stepper(agreed(rank, PADDED), PAGE, NUM_PAGES)
    slot = stepper.admit([1, 2, 3])
    stepper.step(prefill={slot: 3})
    stepper.step(decode=[slot])
    assert [graph.rows for graph in graphs] == [[], [], []], "eager is agreed, though a graph fits"
    stepper._compute = agreed(rank, 8, 8)
    stepper.step(decode=[slot])
    rank.step(dummy_plan(50, 8, 8))
    assert [graph.rows for graph in graphs] == [[], [], [1, 0]], "the group's size, though a smaller one fits"
    assert rank.totals.num_graph_steps == 2


def test_a_graph_that_this_rank_lacks_ends_it_with_what_to_do() -> None:
    rank, _, _ = with_graphs(1, 4)
    with pytest.raises(WorkerError, match="graph of 8 tokens") as raised:
        rank.step(dummy_plan(1, 8, 8))
    assert raised.value.code == ExitCode.SETTINGS


def test_a_graph_with_prompts_is_found_by_its_tokens_and_holds_the_step() -> None:
    absorbed, planned, long = (GraphSize(48, 3, 16, context) for context in (None, 0, 1024))
    graphs = StepGraphs([Recorded(size) for size in (GraphSize(0, 0, 64), absorbed, planned, long)])  # type: ignore[misc]

    def chosen(num_prefill: int, lengths: list[int], start: int = 0) -> GraphSize:
        num_rows = len(lengths)
        inputs = StepInputs(
            freed_F=np.zeros(0, dtype=np.int64),
            new_slots=(),
            appended_A2=np.zeros((0, 2), dtype=np.int64),
            num_prefill=num_prefill,
            slots_R=np.arange(num_rows),
            starts_R=np.array([start] * num_rows, dtype=np.int64),
            lengths_R=np.array(lengths, dtype=np.int64),
            samples_R=np.ones(num_rows, dtype=np.bool_),
            has_lookahead_P=np.zeros(num_prefill, dtype=np.bool_),
            token_ids=np.zeros(sum(lengths[:num_prefill]), dtype=np.int64),
        )
        return graphs.of_tokens(64, inputs).size

    assert chosen(0, [1] * 17) == GraphSize(0, 0, 64)
    assert chosen(1, [48, 1]) == absorbed
    assert chosen(0, []) == GraphSize(0, 0, 64)
    with pytest.raises(WorkerError, match="graph of 64 tokens and this rank captured none that holds"):
        chosen(3, [1, 1, 1])
