"""Each of four greedy answers to a prompt of the recall models is right with any settings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from plait_testing import recall
from plait_testing.metrics import read_metrics, sum_over_replicas
from plait_testing.model_mistakes import record_answers
from plait_testing.recording import Record
from plait_testing.running_server import StartServer

CONTEXT = 2048
NUM_CHOICES = 4
PAGE_SIZE = 16
FLAGS = ("--max-batch-tokens", "2048", "--page-size", str(PAGE_SIZE))
PARTS: dict[str, tuple[str, ...]] = {
    "no-prefix-cache": ("--no-prefix-cache",),
    "no-mixed": ("--no-mixed",),
    "no-overlap": ("--no-overlap",),
    "chunk-64": ("--long-prefill-token-threshold", "64"),
    "preempted": ("--num-pages", "{small_pool}"),
    "tp-2": ("--tp", "2"),
    "dp-2": ("--dp", "2"),
    "default": (),
}
REDUCED = [
    ("recall-gqa", "no-prefix-cache+no-mixed+chunk-64"),
    ("recall-gqa", "no-overlap+preempted"),
    ("recall-mla", "no-prefix-cache+tp-2"),
]
ALONE = [*PARTS, "chunk-64+preempted", "no-prefix-cache+preempted", "no-prefix-cache+chunk-64", "dp-2+tp-2"]
CASES = REDUCED + [
    (model, variant) for model in ("recall-gqa", "recall-mla") for variant in ALONE if (model, variant) not in REDUCED
]
# With so many problems and writers of long answers beside them some request is sure to be preempted.
NUM_FULL = 40
NUM_WRITERS = 12


@pytest.mark.acceptance("cpu")
@pytest.mark.parametrize(("model", "variant"), CASES)
def test_every_choice_is_the_right_answer(
    model: str,
    variant: str,
    check_models: Path,
    server: StartServer,
    sized: Callable[[int, int], int],
    record: Record,
) -> None:
    num = sized(4 if (model, variant) in REDUCED else 0, NUM_FULL)
    if num == 0:
        pytest.skip("at full size alone: other cases have these settings together")
    asked = recall.problems(seed=CONTEXT, num=num // 2, context=CONTEXT)
    asked += recall.about_one_table(7, num - num // 2, CONTEXT)
    small_pool = recall.longest_in_pages(asked, PAGE_SIZE) + NUM_CHOICES
    parts = variant.split("+")
    flags = [flag.format(small_pool=small_pool) for part in parts for flag in PARTS[part]]
    running = server(check_models / model, *FLAGS, *flags)
    num_writers = NUM_WRITERS if "preempted" in parts and num == NUM_FULL else 0
    with recall.writers(running.url, num_writers, small_pool * PAGE_SIZE // 4, model):
        wrong = recall.ask_all(running.url, asked, model=model, n=NUM_CHOICES)
    metrics = sum_over_replicas(read_metrics(running.url))
    case = f"{model} {CONTEXT} n {NUM_CHOICES} {variant}"
    mistakes = record_answers(check_models / model, case, asked, wrong, record)
    record(case, "preemptions", "preemptions", metrics["plait_preemptions_total"])
    assert mistakes == []
    assert metrics["plait_further_choices_total"] == (NUM_CHOICES - 1) * len(asked)
    if num == NUM_FULL:
        assert ("preempted" in parts) == (metrics["plait_preemptions_total"] > 0)
