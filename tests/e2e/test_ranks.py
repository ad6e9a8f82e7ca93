"""Several ranks are one server: the same tokens, one end, and an error that says what works."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import httpx
import psutil
import pytest
from plait_testing.questions import QUESTIONS
from plait_testing.recording import Record
from plait_testing.running_server import Server, StartServer
from plait_testing.slow_steps import SlowSteps


@pytest.mark.acceptance("cpu")
def test_greedy_tokens_are_the_same_on_one_two_and_four_ranks(
    demo_gguf: Path, server: StartServer, sized: Callable[[int, int], int], record: Record
) -> None:
    """SmolLM2's nine heads in three groups divide evenly by neither two nor four ranks."""
    answers = {}
    for num_ranks in (1, 2, 4):
        running = server(demo_gguf, "--dtype", "float32", "--tp", str(num_ranks), "--threads", "1")
        answers[num_ranks] = [greedy(running, question, sized(8, 64)) for question in QUESTIONS[: sized(2, 20)]]
        assert running.stop() == 0
    for num_ranks in (2, 4):
        pairs = zip(answers[num_ranks], answers[1], strict=True)
        different = sum(ours != theirs for ours, theirs in pairs)
        record(f"SmolLM2 float32 tp-{num_ranks}", "answers_different", "answers", different, 0)
    assert answers[2] == answers[1]
    assert answers[4] == answers[1]


def greedy(running: Server, question: str, num_tokens: int) -> list[int]:
    body = {
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        "max_tokens": num_tokens,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    answer = httpx.post(running.url + "/v1/chat/completions", json=body, timeout=600).raise_for_status().json()
    ids: list[int] = answer["choices"][0]["token_ids"]
    return ids


def test_a_killed_rank_ends_the_others_the_streams_and_the_server(
    slow_steps: SlowSteps, server: StartServer, check_models: Path
) -> None:
    running = server(check_models / "recall-mla", "--tp", "2", "--threads", "1")
    slow_steps.begin()
    workers = {rank_of(process): process for process in running.workers()}
    assert sorted(workers) == [0, 1]
    body = {"messages": [{"role": "user", "content": "count 1 40"}], "stream": True, "max_tokens": 4000}
    with httpx.stream(
        "POST", running.url + "/v1/chat/completions", json=body | {"ignore_eos": True}, timeout=60
    ) as got:
        lines = (line.removeprefix("data: ") for line in got.iter_lines() if line)
        next(lines)
        workers[1].kill()
        *_, last = lines
    assert "a worker was lost" in json.loads(last)["error"]["message"]
    assert running.wait() == 5
    assert "rank 1 was lost: worker 1 was killed by SIGKILL" in running.last_line
    assert not workers[0].is_running()


def test_a_stopped_rank_does_not_outlive_the_server(server: StartServer, check_models: Path) -> None:
    running = server(check_models / "recall-mla", "--tp", "2", "--threads", "1")
    workers = {rank_of(process): process for process in running.workers()}
    workers[1].suspend()
    workers[0].kill()
    assert running.wait() == 5
    assert "rank 0 was lost: worker 0 was killed by SIGKILL" in running.last_line
    assert not workers[1].is_running()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stopped_rank_is_lost_though_no_step_waits_for_it(rank: int, server: StartServer, check_models: Path) -> None:
    running = server(check_models / "recall-mla", "--tp", "2", "--threads", "1")
    workers = {rank_of(process): process for process in running.workers()}
    workers[rank].suspend()
    assert running.wait() == 5
    assert f"rank {rank} was lost: worker {rank} was stopped (SIGSTOP, or a debugger) for 2 s" in running.last_line
    assert not workers[1 - rank].is_running()


def test_ranks_are_told_where_the_user_keeps_what_they_compile(
    server: StartServer, check_models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    running = server(check_models / "recall-mla", "--tp", "2", "--threads", "1")
    folders = [words[words.index("--kernel-cache") + 1] for words in (each.cmdline() for each in running.workers())]
    assert folders == [str(tmp_path / "plait" / "kernels")] * 2
    assert not (tmp_path / "plait").exists(), "ranks of a CPU compile nothing"


def rank_of(process: psutil.Process) -> int:
    words: list[str] = process.cmdline()
    return int(words[words.index("--rank") + 1])


def test_a_number_of_ranks_that_does_not_divide_the_model_ends_with_2(server: StartServer, check_models: Path) -> None:
    refused = server(check_models / "recall-mla", "--tp", "3")
    assert refused.wait() == 2
    assert "attention heads (num_attention_heads), 8; these values of --tp work: 1, 2, 4, 8" in refused.last_line
    assert "rank 0" not in refused.errors, "the ranks' own check comes after torch"
