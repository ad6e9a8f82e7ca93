"""Constrained and free answers in one batch: every one is right, however late the masks come."""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from plait_testing import recall
from plait_testing.running_server import start_server

CASES = {
    "gqa": ("recall-gqa",),
    "mla-tp-2": ("recall-mla", "--tp", "2", "--long-prefill-token-threshold", "64"),
    "no-mixed-no-overlap": ("recall-gqa", "--no-mixed", "--no-overlap"),
    "preempted": ("recall-gqa", "--num-pages", "70"),
    "mla": ("recall-mla",),
}
REDUCED = {"gqa": 12}
"""Problems of the cases that are not for full sizes alone."""


def constraint(index: int, answer: str) -> dict[str, Any]:
    """Of every other answer; the right one fits."""
    if index % 2 == 0:
        return {}
    asked: dict[str, Any] = {"choice": [answer, "zzz", answer[:1] + "!"]}
    return {"structured_outputs": asked if index % 4 == 1 else {"regex": f"(.|\n)*{re.escape(answer[-1])}"}}


@pytest.mark.acceptance("cpu")
@pytest.mark.parametrize("case", CASES)
def test_constrained_and_free_answers_of_one_batch_are_right(
    check_models: Path, tmp_path: Path, sized: Callable[[int, int], int], case: str
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

    def ask(index: int) -> str:
        problem = asked[index]
        body = {"model": model, "messages": problem["messages"], "temperature": 0, "max_tokens": 200}
        url = f"{server.url}/v1/chat/completions"
        answer = httpx.post(url, json=body | constraint(index, problem["answer"]), timeout=600)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["message"]["content"])

    try:
        with ThreadPoolExecutor(8) as pool:
            given = list(pool.map(ask, range(num)))
    finally:
        server.kill()
    assert given == [problem["answer"] for problem in asked]
