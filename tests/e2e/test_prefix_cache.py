"""Questions that share their table: most of each prompt comes from the prefix cache, and every answer is right."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from plait_testing import recall
from plait_testing.metrics import read_metrics
from plait_testing.recording import Record
from plait_testing.running_server import StartServer

CONTEXT = 1024
PAGE_SIZE = 16
NUM_TABLES = 3
# Pages for two dialogues, with three tables in alternation: some pages are hit while others are evicted.
TINY_POOL = ("--num-pages", str(2 * CONTEXT // PAGE_SIZE), "--watermark", "1")
VARIANTS = {
    "on": (),
    "off": ("--no-prefix-cache",),
    "evicted": TINY_POOL,
    "evicted+chunk-64": (*TINY_POOL, "--long-prefill-token-threshold", "64"),
}
# recall-mla differs from recall-gqa only in the worker.
CASES = [
    *(("recall-gqa", variant) for variant in VARIANTS),
    *(("recall-mla", variant) for variant in VARIANTS if variant != "evicted"),
]
# Questions about each table, reduced and at full size. One goes first; the others, two at a time, find its pages.
NUM_EACH = {"recall-gqa": (6, 40), "recall-mla": (3, 40)}
NUM_A_TURN = 3
NUM_AT_ONCE = 8


@pytest.mark.acceptance("scheduler")
@pytest.mark.parametrize(("model", "variant"), CASES)
def test_questions_that_share_their_table_are_answered_right(
    model: str,
    variant: str,
    check_models: Path,
    server: StartServer,
    sized: Callable[[int, int], int],
    record: Record,
) -> None:
    num_each = sized(*NUM_EACH[model])
    tables = [recall.about_one_table(seed, num_each, CONTEXT) for seed in range(NUM_TABLES)]
    running = server(check_models / model, "--page-size", str(PAGE_SIZE), *VARIANTS[variant])
    wrong = []
    for first in range(0, num_each, NUM_A_TURN):
        for asked in tables:
            wrong += recall.ask_all(running.url, asked[first : first + 1], model=model)
            others = asked[first + 1 : first + NUM_A_TURN]
            wrong += recall.ask_all(running.url, others, model=model, concurrency=2)
    metrics = read_metrics(running.url)
    share = metrics["plait_prefix_hit_tokens_total"] / metrics["plait_prompt_tokens_total"]
    case = f"{model} {CONTEXT} shared tables, cache {variant}"
    record(case, "problems_right", "problems", NUM_TABLES * num_each - len(wrong), NUM_TABLES * num_each)
    record(case, "share_of_prompt_tokens_cached", "share", share)
    record(case, "evictions", "pages", metrics["plait_prefix_evictions_total"])
    assert wrong == []
    assert_the_cache_did_its_part(variant, share, metrics["plait_prefix_evictions_total"], 1 - 1 / num_each)


@pytest.mark.parametrize("model", ["recall-gqa", "recall-mla"])
@pytest.mark.parametrize("flags", [(), ("--no-overlap",), ("--long-prefill-token-threshold", "40")])
def test_questions_asked_at_once_compute_the_table_they_share_once(
    model: str, flags: tuple[str, ...], check_models: Path, server: StartServer
) -> None:
    asked = recall.about_one_table(7, NUM_AT_ONCE, CONTEXT)
    running = server(check_models / model, "--page-size", str(PAGE_SIZE), "--max-batch-tokens", "256", *flags)
    assert recall.ask_all(running.url, asked, model=model, concurrency=NUM_AT_ONCE) == []
    metrics = read_metrics(running.url)
    num_prompt, num_hits = metrics["plait_prompt_tokens_total"], metrics["plait_prefix_hit_tokens_total"]
    num_own = NUM_AT_ONCE * (PAGE_SIZE + max(len(problem["messages"][1]["content"]) for problem in asked) + 8)
    assert num_prompt - num_hits < 1.1 * (num_prompt / NUM_AT_ONCE + num_own)


def assert_the_cache_did_its_part(variant: str, share: float, num_evictions: float, at_best: float) -> None:
    """Right answers prove little if no page was hit, or none was evicted.

    `at_best`: the share of the questions that are not their table's first.
    """
    if variant == "off":
        assert share == 0
    elif variant == "on":
        assert share > 0.9 * at_best
        assert num_evictions == 0
    else:
        assert share > 0.4
        assert num_evictions > 0
