"""Constrained and free answers in one batch: every one is right, however late the masks come."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from plait_testing import recall
from plait_testing.model_mistakes import mistakes_of_the_engine
from plait_testing.recording import Record
from plait_testing.running_server import start_server

CASES = {
    "gqa": ("recall-gqa",),
    "mla-tp-2": ("recall-mla", "--tp", "2", "--long-prefill-token-threshold", "64"),
    "no-mixed-no-overlap": ("recall-gqa", "--no-mixed", "--no-overlap"),
    "preempted": ("recall-gqa", "--num-pages", "70"),
    "mla": ("recall-mla",),
    "dp-2": ("recall-gqa", "--dp", "2"),
    "dp-2-attention": ("recall-mla", "--dp", "2", "--dp-attention", "--max-batch-tokens", "2048"),
    "dp-2-tp-2-attention": ("recall-mla", "--dp", "2", "--tp", "2", "--dp-attention", "--max-batch-tokens", "2048"),
}
REDUCED = {"gqa": 12, "dp-2-attention": 8}
"""Problems of the cases that are not for full sizes alone."""


@pytest.mark.acceptance("cpu")
@pytest.mark.parametrize("case", CASES)
def test_constrained_and_free_answers_of_one_batch_are_right(
    check_models: Path, tmp_path: Path, sized: Callable[[int, int], int], record: Record, case: str
) -> None:
    num = sized(REDUCED.get(case, 0), 100)
    if num == 0:
        pytest.skip("for full sizes")
    model, *flags = CASES[case]
    log = tmp_path / "server.log"
    server = start_server(
        log, check_models / model, "--dtype", "float32", "--max-seqs", "8", "--page-size", "16", *flags
    )
    assert server.url, server.errors
    asked = recall.problems(5, num, 1024)
    try:
        wrong = recall.ask_all(server.url, asked, model=model, own=recall.constraint, max_tokens=200)
    finally:
        server.kill()
    mistakes = mistakes_of_the_engine(check_models / model, asked, wrong)
    record(f"half constrained, {case}", "problems_right", "problems", num - len(wrong), num)
    record(f"half constrained, {case}", "mistakes_of_the_engine", "problems", len(mistakes), 0)
    assert mistakes == []
