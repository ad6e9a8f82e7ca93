"""A captured step reads the plan's inputs, padded with rows that touch no request."""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from plait_kernels.attention import attend
from plait_kernels.kv_cache import PageScales, store
from plait_kernels.sampling import sample_greedy
from plait_testing.attention_cases import cpu_attention
from plait_testing.stepper import Stepper
from plait_testing.tiny_models import VOCAB, save_tiny_llama
from plait_worker.attention.lengths import slot_mapping
from plait_worker.attention.spec import MhaShape, distinct
from plait_worker.cache import KVCache
from plait_worker.graph_inputs import GraphInputs
from plait_worker.graph_sizes import MOST_PLANNED, GraphSize, capture_sizes, needed_size
from plait_worker.graphs import StepGraphs
from plait_worker.models.loader import load_model
from plait_worker.models.model import Model
from plait_worker.parallel import Parallel
from plait_worker.rank import Rank
from plait_worker.rows import DeviceLengths, Rows
from plait_worker.slots import Slots
from plait_worker.step_inputs import StepInputs, read_plan
from torch import Tensor

CPU = torch.device("cpu")
PAGE, NUM_PAGES = 16, 64
ROOMY = GraphSize(prompt_tokens=96, prompt_rows=4, decode_rows=5)
PROMPTS_ALONE = GraphSize(prompt_tokens=96, prompt_rows=4, decode_rows=0)


@dataclass(frozen=True)
class TokenByToken:
    """Attention that reads nothing but tensors, as in a captured step: each token by its row, table and position."""

    rows: Rows
    lengths: DeviceLengths
    scale: float

    def forward(self, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, pages: Tensor, _scales: PageScales) -> Tensor:
        store(k_TGD, v_TGD, pages, slot_mapping(self.rows, self.lengths, PAGE))
        out_THD = torch.empty_like(q_THD)
        for token, (row, position) in enumerate(zip(self.lengths.row_T, self.rows.positions_T, strict=True)):
            kv = pages[self.rows.page_table_RW[row]].transpose(2, 3)
            k_LGD, v_LGD = (kv[:, part].flatten(0, 1)[: position + 1] for part in (0, 1))
            out_THD[token] = attend(q_THD[token : token + 1], k_LGD, v_LGD, self.scale)[0]
        return out_THD


@dataclass
class Replayed:
    """The one graph of a size, computed anew at each replay: a CPU captures nothing."""

    rank: Rank
    inputs: GraphInputs
    size: GraphSize
    logits: Tensor = field(default_factory=lambda: torch.empty(0))
    num_sampled: int = 0

    def replay(self, inputs: StepInputs) -> Tensor:
        self.inputs.fill(inputs)
        rows = self.inputs.rows(self.rank.slots)
        assert rows.device_lengths is not None
        (spec,) = distinct(self.rank.model.attention_specs)
        assert isinstance(spec, MhaShape)
        step = TokenByToken(rows, rows.device_lengths, spec.scale)
        hidden_TD = self.rank.model.forward(rows, self.rank.cache, [step])
        self.logits = self.rank.model.logits(hidden_TD[rows.sample_index_S])
        return self.logits[: int(inputs.samples_R.sum())]

    def sample(self, num: int) -> Tensor:
        self.num_sampled += 1
        ids = sample_greedy(self.logits)
        self.rank.slots.keep_tokens(self.inputs.sampled_slots, ids)
        return ids[:num].to(torch.int32)


def make_rank(model: Model[Any], graphs: StepGraphs) -> Rank:
    return Rank(
        model=model,
        cache=KVCache(model.cache_specs, NUM_PAGES, PAGE, CPU),
        attention=cpu_attention(model.attention_specs, PAGE, PAGE),
        slots=Slots(8, NUM_PAGES, PAGE, 256, CPU),
        parallel=Parallel(),
        graphs=graphs,
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model[Any]:
    folder: Path = tmp_path_factory.mktemp("tiny")
    save_tiny_llama(folder)
    return load_model(folder, "float32", CPU, Parallel())


def serve_some(rank: Rank) -> list[list[int]]:
    """Five requests that come, prefill in chunks beside one another's decoding, and go."""
    choose = random.Random(5)
    stepper = Stepper(rank.step, PAGE, NUM_PAGES)
    outputs = []
    for _ in range(60):
        waiting = [slot for slot, request in stepper.requests.items() if request.num_left]
        decoding = [slot for slot, request in stepper.requests.items() if not request.num_left]
        for slot in [slot for slot in decoding if len(stepper.requests[slot].output) > 9]:
            outputs.append(stepper.free(slot).output)
            decoding.remove(slot)
        if len(stepper.requests) < 5:
            prompt = choose.choices(range(VOCAB), k=choose.randint(1, 90))
            waiting.append(stepper.admit(prompt, temperature=choose.choice([0.0, 0.9]), seed=len(outputs)))
        chunks = {slot: min(stepper.requests[slot].num_left, choose.choice([7, 31])) for slot in waiting[:3]}
        stepper.step(prefill=chunks, decode=decoding)
    return outputs


def test_padded_steps_sample_what_steps_of_their_own_size_do(model: Model[Any]) -> None:
    graphs: list[Replayed] = []
    padded = make_rank(model, StepGraphs(graphs))  # type: ignore[arg-type]
    for size in (PROMPTS_ALONE, ROOMY):
        graphs.append(Replayed(padded, GraphInputs(size, padded.slots), size))
    outputs = serve_some(padded)
    assert len(outputs) > 5
    assert outputs == serve_some(make_rank(model, StepGraphs()))
    assert padded.totals.num_graph_steps > 30
    num_sampled = [graph.num_sampled for graph in graphs]
    assert all(num_sampled)
    assert sum(num_sampled) < padded.totals.num_graph_steps  # some steps have rows that draw


def test_sizes_cover_every_decode_step_with_little_padding() -> None:
    made = capture_sizes(256, 8192)
    assert [size.num_tokens for size in made] == sorted(size.num_tokens for size in made)
    assert max(size.decode_rows for size in made) == 256
    assert len([size for size in made if size.prompt_rows == 0]) <= 24


def test_steps_with_prompts_fill_whole_tiles_of_a_product() -> None:
    with_prompts = [size for size in capture_sizes(256, 8192) if size.prompt_rows]
    assert all(size.num_tokens % 128 == 0 for size in with_prompts)
    assert {size.prompt_tokens for size in with_prompts} >= {128, 1024, 2048}  # a prompt alone


@pytest.mark.parametrize(("num_prompt", "num_decode"), [(2048, 0), (2040, 8), (1024, 0), (512, 0), (65, 256)])
def test_planned_steps_hold_whole_token_budgets(num_prompt: int, num_decode: int) -> None:
    needed = GraphSize(num_prompt, 1, num_decode, 100)
    roomy = [
        size for size in capture_sizes(256, 2048, (0, 1024)) if size.context_tokens is not None and size.fits(needed)
    ]
    assert roomy[0].prompt_tokens - num_prompt < 512
    assert roomy[0].context_tokens == 1024


def planned_for(needed: GraphSize, max_tokens: int) -> list[GraphSize]:
    made = capture_sizes(512, max_tokens, (0, 1024, 4096, 8192))
    return [size for size in made if size.context_tokens is not None and size.fits(needed)]


@pytest.mark.parametrize("max_tokens", [4096, 8000, 8192])
@pytest.mark.parametrize("num_decode", [0, 1, 32, 33, 128, 129, 256, 384, 512])
@pytest.mark.parametrize("num_cached", [0, 1000, 8000])
def test_a_full_step_has_a_graph_of_hardly_more_tokens(max_tokens: int, num_decode: int, num_cached: int) -> None:
    needed = GraphSize(max_tokens - num_decode, 64, num_decode, num_cached)
    best = planned_for(needed, max_tokens)[0]
    assert best.num_tokens < max_tokens + 2 * 128
    assert best.context_tokens == {0: 0, 1000: 1024, 8000: 8192}[num_cached]


@pytest.mark.parametrize("num_prompt", [*range(3073, 8193, 512), 8192])
def test_larger_steps_have_graphs_that_they_fill_by_three_quarters(num_prompt: int) -> None:
    best = planned_for(GraphSize(num_prompt, 8, 9, 99), 8192)[0]
    assert best.prompt_tokens * 3 <= num_prompt * 4


def test_no_graph_has_more_prompt_tokens_than_lists_were_made_for() -> None:
    assert max(size.prompt_tokens for size in capture_sizes(256, 16_384, (0,))) == MOST_PLANNED


@pytest.mark.parametrize("num_decode", [0, 32, 129, 256, 512])
def test_steps_of_larger_budgets_have_graphs_of_the_most_prompt_tokens(num_decode: int) -> None:
    for max_tokens in (8200 + num_decode, 16_384):
        best = planned_for(GraphSize(MOST_PLANNED, 8, num_decode, 0), max_tokens)[0]
        assert best.num_tokens < MOST_PLANNED + num_decode + 128


@pytest.mark.parametrize("max_tokens", [3073, 4000, 8000, 8191, 8192, 9000])
@pytest.mark.parametrize("max_rows", [1, 8, 32, 64, 129, 256, 1024])
def test_padding_of_a_full_step_fits_the_buffers_of_ranks(max_rows: int, max_tokens: int) -> None:
    made = capture_sizes(max_rows, max_tokens, (0, 8192))
    assert max(size.num_tokens for size in made) <= max_tokens + max_rows
    assert any(size.fits(GraphSize(min(max_tokens, MOST_PLANNED), 8, 0, 8192)) for size in made)


def test_the_usual_step_has_no_graph_of_more_tokens() -> None:
    assert max(size.num_tokens for size in capture_sizes(64, 2048, (0, 8192))) == 2048 + 64


def test_no_graph_is_larger_than_a_step_may_be() -> None:
    assert max(size.num_tokens for size in capture_sizes(8, 300)) == 256


def test_cached_tokens_of_prompts_are_listed_if_the_graph_holds_them(model: Model[Any]) -> None:
    rank = make_rank(model, StepGraphs())
    stepper = Stepper(rank.step, PAGE, NUM_PAGES)
    slots = [stepper.admit(list(range(length))) for length in (40, 20, 30)]
    stepper.step(prefill={slots[0]: 25, slots[2]: 3})
    plan = stepper.step(prefill={slots[0]: 5, slots[1]: 7, slots[2]: 1})
    size = GraphSize(prompt_tokens=16, prompt_rows=4, decode_rows=2, context_tokens=30)
    inputs, graph_inputs = read_plan(plan), GraphInputs(size, rank.slots)
    graph_inputs.fill(inputs)
    lengths = graph_inputs.rows(rank.slots).device_lengths
    assert lengths is not None
    assert lengths.context is not None
    assert lengths.context.row_I.tolist() == [0] * 25 + [2] * 3 + [3, 3]
    assert lengths.context.position_I.tolist() == [*range(25), *range(3), 0, 0]
    assert size.fits(needed_size(inputs))
    assert not dataclasses.replace(size, context_tokens=27).fits(needed_size(inputs))


def test_steps_without_prompts_are_not_planned(model: Model[Any]) -> None:
    stepper = Stepper(make_rank(model, StepGraphs()).step, PAGE, NUM_PAGES)
    first, second = stepper.admit(list(range(9))), stepper.admit(list(range(9)))
    prompts = needed_size(read_plan(stepper.step(prefill={first: 9, second: 4})))
    decode = needed_size(read_plan(stepper.step(decode=[first])))
    planned = [size for size in capture_sizes(256, 8192, (0, 4096)) if size.context_tokens is not None]
    assert {size.context_tokens for size in planned} == {0, 4096}
    assert all(size.fits(prompts) for size in planned)
    assert not any(size.fits(decode) for size in planned)
