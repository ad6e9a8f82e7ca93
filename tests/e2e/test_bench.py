"""`plait bench` against a real server: what was asked for is what was served and counted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from plait import cli
from plait_testing.running_server import Server

IDS = "100-200"
"""Inside the vocabulary of the small model."""


def bench(server: Server, out: Path, *words: str) -> list[dict[str, object]]:
    """The runs that `plait bench serve` recorded; how late the client was on a busy machine is no claim here."""
    always = ("--out", str(out), "--no-plots", "--requests", "--max-lag-ms", "10000")
    assert cli.run(["bench", "serve", "--url", server.url, *always, *words]) == 0
    (path,) = out.glob("*.json")
    runs: list[dict[str, object]] = json.loads(path.read_text())["runs"]
    return runs


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(("--num-prompts", "8", "--input-len", "uniform:5-60", "--concurrency", "4"), id="closed loop"),
        pytest.param(("--profile", "sonnet", "--scale", "0.05"), id="profile"),
    ],
)
def test_prompts_and_answers_have_exactly_the_lengths_asked_for(
    recall_server: Server, tmp_path: Path, words: tuple[str, ...]
) -> None:
    (run,) = bench(recall_server, tmp_path, *words, "--output-len", "9", "--token-range", IDS)
    assert run["failures"] == {}
    assert run["notes"] == []
    assert run["counted_by"] == "running-usage"
    assert run["finish_reasons"] == {"length": 8}


def test_a_chat_is_sized_by_what_the_server_says(recall_server: Server, tmp_path: Path) -> None:
    words = ("--api", "chat", "--num-prompts", "2", "--input-len", "300", "--output-len", "3", "--salt", "sized")
    (run,) = bench(recall_server, tmp_path, *words)
    requests = run["requests"]
    assert isinstance(requests, list)
    assert all(abs(one["num_prompt_tokens"] - 300) <= 60 for one in requests)
