"""Every answer of the recall models is right with any settings: a wrong row, page or position would show.

Where an answer is wrong, transformers is asked: a mistake that it makes too, in float32, is the model's own.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from plait_testing import recall
from plait_testing.metrics import read_metrics, sum_over_replicas
from plait_testing.model_mistakes import mistakes_of_the_engine, record_answers
from plait_testing.recording import Record
from plait_testing.running_server import StartServer

# One setting varied from the default (chunks of 2048 as on a GPU, mixed, overlap, a large pool), then pairs that share
# code: chunks and preemption, chunks and separate phases, preemption and each phase.
CHUNK = ("--max-batch-tokens", "2048")
ROOMY = {
    "default": (),
    "chunk-64": ("--long-prefill-token-threshold", "64"),
    "no-mixed": ("--no-mixed",),
    "no-overlap": ("--no-overlap",),
    "chunk-64+no-mixed": ("--long-prefill-token-threshold", "64", "--no-mixed"),
}
PREEMPTED = {
    "preempted": (),
    "chunk-64+preempted": ("--long-prefill-token-threshold", "64"),
    "no-mixed+preempted": ("--no-mixed",),
    "no-overlap+preempted": ("--no-overlap",),
}
PAGE_SIZE = 16
SMALL_POOL = ("--page-size", str(PAGE_SIZE), "--num-pages", "{small_pool}")
# MLA, and both models under tensor parallelism and in replicas.
MLA_AND_RANKS = {
    ("recall-mla", "default"): (),
    ("recall-mla", "chunk-64"): ("--long-prefill-token-threshold", "64"),
    ("recall-mla", "context-chunk-256"): ("--mla-context-chunk-size", "256", "--max-batch-tokens", "512"),
    ("recall-mla", "no-mixed"): ("--no-mixed",),
    ("recall-mla", "preempted"): SMALL_POOL,
    ("recall-mla", "fp8"): ("--kv-cache-dtype", "fp8", "--k-scale", "0.37", "--max-batch-tokens", "512"),
    ("recall-mla", "tp-2"): ("--tp", "2"),
    ("recall-mla", "tp-4"): ("--tp", "4"),
    ("recall-mla", "chunk-64+tp-2"): ("--long-prefill-token-threshold", "64", "--tp", "2"),
    ("recall-gqa", "tp-2"): ("--tp", "2"),
    ("recall-gqa", "tp-4"): ("--tp", "4"),
    ("recall-mla", "dp-2"): ("--dp", "2"),
    ("recall-mla", "dp-2+tp-2"): ("--dp", "2", "--tp", "2"),
    ("recall-mla", "chunk-64+dp-2"): ("--dp", "2", "--long-prefill-token-threshold", "64"),
    ("recall-gqa", "dp-2+tp-2"): ("--dp", "2", "--tp", "2"),
    ("recall-gqa", "no-mixed+dp-2"): ("--dp", "2", "--no-mixed"),
}
# Context -> problems reduced, problems at full size.
SIZES = {2048: (20, 200), 8192: (2, 40)}
SIZES_OF_MLA_AND_RANKS = {2048: (3, 200), 8192: (0, 40)}
# With at least so many problems a run is sure to have mixed steps and preemptions.
ENOUGH = 20
# Context -> long answers beside the problems, for preemption, reduced and at full size; at 8k each costs minutes.
NUM_WRITERS = {2048: (2, 12), 8192: (4, 4)}


@pytest.mark.acceptance("spine")
@pytest.mark.parametrize("variant", ROOMY)
def test_every_answer_is_right(
    variant: str,
    check_models: Path,
    server: StartServer,
    sized: Callable[[int, int], int],
    record: Record,
) -> None:
    model = check_models / "recall-gqa"
    running = server(model, *CHUNK, *ROOMY[variant])
    mistakes = []
    for context, sizes in SIZES.items():
        asked = recall.problems(seed=context, num=sized(*sizes), context=context)
        wrong = recall.ask_all(running.url, asked)
        mistakes += record_answers(model, f"recall-gqa {context} {variant}", asked, wrong, record)
    assert mistakes == []
    assert_settings_were_exercised(variant, read_metrics(running.url), sized(*SIZES[2048]))


@pytest.mark.acceptance("spine")
@pytest.mark.parametrize("context", SIZES)
@pytest.mark.parametrize("variant", PREEMPTED)
def test_every_answer_is_right_where_requests_give_way(
    variant: str,
    context: int,
    check_models: Path,
    server: StartServer,
    sized: Callable[[int, int], int],
    record: Record,
) -> None:
    model = check_models / "recall-gqa"
    asked = recall.problems(seed=context, num=sized(*SIZES[context]), context=context)
    small_pool = recall.longest_in_pages(asked, PAGE_SIZE)
    running = server(model, *CHUNK, *with_pool(SMALL_POOL, small_pool), *PREEMPTED[variant])
    num_writers = sized(*NUM_WRITERS[context]) if len(asked) >= ENOUGH else 0
    with recall.writers(running.url, num_writers, num_tokens=small_pool * PAGE_SIZE // 4):
        wrong = recall.ask_all(running.url, asked)
    metrics = read_metrics(running.url)
    case = f"recall-gqa {context} {variant}"
    record(case, "preemptions", "preemptions", metrics["plait_preemptions_total"])
    assert record_answers(model, case, asked, wrong, record) == []
    assert_settings_were_exercised(variant, metrics, len(asked))


@pytest.mark.acceptance("cpu")
@pytest.mark.parametrize(("model", "variant"), MLA_AND_RANKS)
def test_every_mla_and_parallel_answer_is_right(
    model: str,
    variant: str,
    check_models: Path,
    server: StartServer,
    sized: Callable[[int, int], int],
    record: Record,
) -> None:
    sizes = {context: sized(*both) for context, both in SIZES_OF_MLA_AND_RANKS.items()}
    asked = [recall.problems(seed=context, num=num, context=context) for context, num in sizes.items()]
    small_pool = recall.longest_in_pages([problem for problems in asked for problem in problems], PAGE_SIZE)
    running = server(check_models / model, *CHUNK, *with_pool(MLA_AND_RANKS[model, variant], small_pool))
    num_writers = 12 if variant == "preempted" and sum(map(len, asked)) >= ENOUGH else 0
    with recall.writers(running.url, num_writers, small_pool * PAGE_SIZE // 4, model):
        wrong = [recall.ask_all(running.url, problems, model=model) for problems in asked]
    metrics = sum_over_replicas(read_metrics(running.url))
    record(f"{model} {variant}", "preemptions", "preemptions", metrics["plait_preemptions_total"])
    mistakes = [
        mistake
        for context, problems, found in zip(sizes, asked, wrong, strict=True)
        for mistake in record_answers(check_models / model, f"{model} {context} {variant}", problems, found, record)
    ]
    # FP8 keeps four bits of a cached value. The cost is recorded and may be a tenth of the answers at most.
    assert len(mistakes) <= (sum(map(len, asked)) // 10 if variant == "fp8" else 0), mistakes
    assert_settings_were_exercised(variant, metrics, sum(map(len, asked)))


def with_pool(flags: tuple[str, ...], small_pool: int) -> list[str]:
    return [flag.format(small_pool=small_pool) for flag in flags]


def assert_settings_were_exercised(variant: str, metrics: dict[str, float], num_problems: int) -> None:
    """A variant must do what its name says; with a handful of problems it may not get there."""
    if num_problems < ENOUGH:
        return
    assert ("no-mixed" in variant) == (metrics['plait_steps_total{kind="mixed"}'] == 0)
    assert ("preempted" in variant) == (metrics["plait_preemptions_total"] > 0)


def test_a_mistake_that_transformers_makes_too_is_the_models_own(check_models: Path) -> None:
    """Problem 113 of the suite is one that recall-mla itself gets wrong: 4881 + 8124."""
    asked = recall.problems(seed=2048, num=114, context=2048)
    answers = ("12005", "13006", "HTTP 500: internal error")
    wrong = [recall.Wrong(113, "add", asked[113]["answer"], given) for given in answers]
    assert mistakes_of_the_engine(check_models / "recall-mla", asked, wrong) == wrong[1:]
