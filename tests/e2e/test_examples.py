"""Every program in examples/ runs and prints what it promises."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from plait_testing import budgets
from plait_testing.running_server import Server, StartServer

EXAMPLES = budgets.ROOT / "examples"
PROMPT = [256, 260, *b"copy kilo", 261]
TESTED = {
    "chat.py",
    "streaming.py",
    "token_ids.py",
    "simulate_trace.py",
    "compare_servers.py",
    "follow_cache.py",
    "offline.py",
}


def run(name: str, *argv: str) -> str:
    """What an example prints."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *argv], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_no_example_is_left_untested() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == TESTED
    readme = (EXAMPLES / "README.md").read_text()
    assert all(f"({name})" in readme for name in TESTED)


def test_chat_prints_the_answer_and_its_tokens(recall_server: Server) -> None:
    answer, tokens = run("chat.py", "copy kilo", "--url", recall_server.url).splitlines()
    assert answer == "kilo"
    assert tokens == "[12 prompt tokens, 5 generated]"


def test_streaming_prints_the_answer_and_its_latencies(recall_server: Server) -> None:
    printed = run("streaming.py", "copy kilo", "--url", recall_server.url)
    assert re.fullmatch(r".+\n\[first token after \d+ ms, then one every [\d.]+ ms\]\n", printed), printed


def test_token_ids_come_back_with_their_log_probabilities(recall_server: Server) -> None:
    words = [str(token) for token in PROMPT]
    *rows, end = run("token_ids.py", *words, "--url", recall_server.url).splitlines()
    assert end == "finish_reason: stop"
    ids, logprobs = [row.split()[0] for row in rows], [float(row.split()[2]) for row in rows]
    assert bytes(map(int, ids[:4])) == b"kilo"
    assert all(logprob <= 0 for logprob in logprobs)


def test_a_trace_is_simulated_with_each_variant() -> None:
    head, *rows = run("simulate_trace.py").splitlines()
    assert head.split()[:3] == ["ms", "TTFT", "p50"]
    figures = {row[:16].strip(): [float(word) for word in row[16:].split()] for row in rows}
    assert list(figures) == ["default", "no mixed steps", "chunks of 512"]
    assert all(value > 0 for row in figures.values() for value in row)


@pytest.mark.parametrize("flags", [("--token-range", "100-200", "--num-prompts", "8", "--max-lag-ms", "10000")])
def test_two_servers_are_compared(
    recall_server: Server, server: StartServer, check_models: Path, flags: tuple[str, ...]
) -> None:
    other = server(check_models / "recall-gqa", "--max-seqs", "16", "--threads", "2")
    printed = run("compare_servers.py", recall_server.url, other.url, *flags)
    ratios = dict(re.findall(r"^  (\w+) +([\d.]+)$", printed.partition("median of the seeds")[2], re.MULTILINE))
    assert set(ratios) == {"output_tokens_per_second", "ttft_p50", "itl_p50", "e2e_p50"}
    compared = dict(re.findall(r"^  (\w+) .* ([\d.]+) \([\d.]+ - [\d.]+\)$", printed, re.MULTILINE))
    assert ratios == {metric: compared[metric] for metric in ratios}


def test_a_model_answers_without_a_server_as_with_one(recall_server: Server, check_models: Path) -> None:
    """From coroutines, in a script without `if __name__ == "__main__"`."""
    asked = {"temperature": 0, "max_tokens": 8}
    prompts = ["The capital of France is", "Water boils at"]
    completions = httpx.post(f"{recall_server.url}/v1/completions", json=asked | {"prompt": prompts}, timeout=60)
    texts = [choice["text"] for choice in completions.json()["choices"]]
    messages = [{"role": "user", "content": "Say hello."}]
    chat = httpx.post(f"{recall_server.url}/v1/chat/completions", json=asked | {"messages": messages}, timeout=60)
    texts.append(chat.json()["choices"][0]["message"]["content"])
    printed = run("offline.py", str(check_models / "recall-gqa"))
    heads = [f"{prompt} {text!r} [" for prompt, text in zip([*prompts, None], texts, strict=True)]
    assert [line[: len(head)] for line, head in zip(printed.splitlines(), heads, strict=True)] == heads
