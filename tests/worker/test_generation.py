"""A real model, stepped in process: chunks and mixed steps do not change its answers."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from plait_testing.attention_cases import cpu_attention
from plait_testing.stepper import Record, Stepper
from plait_testing.tiny_models import VOCAB, save_tiny_llama
from plait_worker.cache import KVCache
from plait_worker.models.loader import load_model
from plait_worker.models.model import Model
from plait_worker.parallel import Parallel
from plait_worker.rank import Rank
from plait_worker.slots import Slots
from transformers import LlamaForCausalLM

PAGE = 16
NUM_PAGES = 256
SAMPLING: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "seed": 11},
    {"temperature": 0.7, "top_k": 20, "seed": 12},
    {"temperature": 1.3, "top_p": 0.9, "seed": 13},
    {"temperature": 2.0, "min_p": 0.02, "seed": 14},
    {"temperature": 1.0, "top_k": 40, "top_p": 0.95, "min_p": 0.01, "seed": 2**63},
]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, LlamaForCausalLM]:
    folder = tmp_path_factory.mktemp("tiny")
    return folder, save_tiny_llama(folder)


@pytest.fixture(scope="module")
def model(reference: tuple[Path, LlamaForCausalLM]) -> Model[Any]:
    return load_model(reference[0], "float32", torch.device("cpu"), Parallel())


@pytest.fixture
def new_stepper(model: Model[Any]) -> Callable[[], Stepper]:
    def make() -> Stepper:
        cpu = torch.device("cpu")
        rank = Rank(
            model=model,
            cache=KVCache(model.cache_specs, NUM_PAGES, PAGE, cpu),
            attention=cpu_attention(model.attention_specs, PAGE, PAGE),
            slots=Slots(8, NUM_PAGES, PAGE, 512, cpu),
            parallel=Parallel(),
        )
        return Stepper(rank.step, PAGE, NUM_PAGES)

    return make


def some_prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=length)


def step_mixed(stepper: Stepper, slots: list[int], draw: random.Random, num_tokens: int) -> None:
    """Random chunks and random pauses until every slot has its tokens; both kinds of rows share steps."""
    while any(len(stepper.requests[slot].output) < num_tokens for slot in slots):
        chosen = [slot for slot in slots if draw.random() < 0.7 and len(stepper.requests[slot].output) < num_tokens]
        left = {slot: stepper.requests[slot].num_left for slot in chosen}
        prefill = {slot: draw.randint(1, num) for slot, num in left.items() if num > 0}
        stepper.step(prefill, [slot for slot in chosen if left[slot] == 0])


@pytest.mark.parametrize("seed", range(2))
def test_mixed_steps_give_the_tokens_of_separate_ones(new_stepper: Callable[[], Stepper], seed: int) -> None:
    draw = random.Random(seed)
    prompts = [some_prompt(seed * 10 + i, draw.randint(1, 90)) for i in range(len(SAMPLING))]
    alone = []
    for prompt, sampling in zip(prompts, SAMPLING, strict=True):
        stepper = new_stepper()
        slot = stepper.admit(prompt, **sampling)
        alone.append(stepper.generate(slot, num_tokens=16, chunk=len(prompt)))
    stepper = new_stepper()
    slots = [stepper.admit(prompt, **sampling) for prompt, sampling in zip(prompts, SAMPLING, strict=True)]
    step_mixed(stepper, slots, draw, num_tokens=16)
    assert [stepper.requests[slot].output for slot in slots] == alone


def test_sampled_tokens_vary_with_the_seed_only(new_stepper: Callable[[], Stepper]) -> None:
    outputs = []
    for seed in (1, 2, 1):
        stepper = new_stepper()
        slot = stepper.admit(some_prompt(0, 30), temperature=1.0, seed=seed)
        outputs.append(stepper.generate(slot, num_tokens=20, chunk=30))
    assert outputs[0] == outputs[2] != outputs[1]


def reference_logprobs(reference: LlamaForCausalLM, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return torch.log_softmax(reference(torch.tensor([tokens])).logits[0].double(), dim=-1)


def check(record: Record, logprobs_V: torch.Tensor, token: int) -> None:
    best = logprobs_V.topk(len(record.best_ids))
    assert record.logprob == pytest.approx(logprobs_V[token].item(), abs=1e-4)
    assert record.rank == int((logprobs_V > logprobs_V[token]).sum()) + 1
    assert list(record.best_logprobs) == pytest.approx(best.values.tolist(), abs=1e-4)
    assert list(record.best_ids) == best.indices.tolist()


@pytest.mark.parametrize("chunk", [1, 13, 64])
def test_log_probabilities_are_the_model_s_own_before_temperature(
    new_stepper: Callable[[], Stepper], reference: tuple[Path, LlamaForCausalLM], chunk: int
) -> None:
    stepper = new_stepper()
    prompt = some_prompt(chunk, 40)
    slot = stepper.admit(prompt, temperature=1.5, top_k=50, seed=3, logprobs=4, prompt_logprobs=2)
    output = stepper.generate(slot, num_tokens=8, chunk=chunk)
    expected_TV = reference_logprobs(reference[1], prompt + output)
    request = stepper.requests[slot]
    for place, record in enumerate(request.prompt_records):
        check(record, expected_TV[place], prompt[place + 1])
    for index, record in enumerate(request.records):
        check(record, expected_TV[len(prompt) - 1 + index], output[index])
    assert len(request.prompt_records) == 39
