"""Several replicas are one server: right answers, routing by prefix, one drain, and no loss but a replica's own."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest
from bench.dp.front_door import load, mock_server
from plait.cli import run
from plait_testing import recall
from plait_testing.metrics import read_metrics
from plait_testing.running_server import Server, StartServer
from plait_testing.slow_steps import SlowSteps

LONG = {"prompt": "count 1 9", "max_tokens": 600, "ignore_eos": True, "stream": True}
TwoAnswers = tuple[Server, list["Future[list[str]]"]]
FLAGS = ("--threads", "1", "--max-model-len", "1024")


def of_replica(running: Server, name: str, replica: int) -> float:
    return read_metrics(running.url)[f'{name}{{replica="{replica}"}}']


def rank_of(process: psutil.Process) -> int:
    words: list[str] = process.cmdline()
    return int(words[words.index("--rank") + 1])


def events_of(url: str) -> list[str]:
    """The events of one long answer."""
    with httpx.stream("POST", f"{url}/v1/completions", json=LONG, timeout=120) as got:
        return [line.removeprefix("data: ") for line in got.iter_lines() if line]


def wait_for_tokens(running: Server, replica: int) -> None:
    deadline = time.monotonic() + 60
    while of_replica(running, "plait_generated_tokens_total", replica) <= 3:
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def two_long_answers(slow_steps: SlowSteps, server: StartServer, check_models: Path) -> Iterator[TwoAnswers]:
    """Two replicas that write a long answer each, slowly."""
    running = server(check_models / "recall-gqa", "--dp", "2", *FLAGS)
    slow_steps.begin()
    with ThreadPoolExecutor(2) as pool:
        reading = [pool.submit(events_of, running.url) for _ in range(2)]
        for replica in (0, 1):
            wait_for_tokens(running, replica)
        yield running, reading


@pytest.mark.parametrize("tp", [1, 2])
def test_replicas_answer_right_and_share_the_requests(
    slow_steps: SlowSteps, server: StartServer, check_models: Path, tp: int
) -> None:
    running = server(check_models / "recall-gqa", "--dp", "2", "--tp", str(tp), *FLAGS)
    assert sorted(rank_of(process) for process in running.workers()) == list(range(2 * tp))
    ranks = ["rank 0", "rank 1"] if tp == 1 else ["ranks 0 to 1", "ranks 2 to 3"]
    for number, of in enumerate(ranks):
        assert running.read_line(f"replica {number}, {of}: weights")
    slow_steps.begin()
    with ThreadPoolExecutor(1) as pool:
        wrong = pool.submit(recall.ask_all, running.url, recall.problems(11, 8, 512))
        for replica in (0, 1):
            wait_for_tokens(running, replica)
        slow_steps.end()
        assert wrong.result() == []
    assert running.stop(signal.SIGTERM) == 0


def test_questions_about_one_table_go_where_its_pages_are(server: StartServer, check_models: Path) -> None:
    running = server(check_models / "recall-gqa", "--dp", "2", *FLAGS)
    asked = recall.about_one_table(5, 4, 500)
    assert recall.ask_all(running.url, asked, concurrency=1) == []
    hits = [of_replica(running, "plait_prefix_hit_tokens_total", replica) for replica in (0, 1)]
    assert hits[1] == 0
    assert hits[0] > 3 * 200


def test_a_killed_replica_takes_its_own_streams_and_the_other_serves_on(
    two_long_answers: TwoAnswers, slow_steps: SlowSteps
) -> None:
    running, answers = two_long_answers
    next(process for process in running.workers() if rank_of(process) == 1).kill()
    slow_steps.end()
    lost = [json.loads(last) for last in (answer.result()[-1] for answer in answers) if last != "[DONE]"]
    assert len(lost) == 1
    assert "replica 1 was lost" in lost[0]["error"]["message"]
    assert "1 of 2 serve on" in running.read_line("Replica 1 was lost: rank 1 was lost: worker 1 was killed by SIGKILL")
    assert running.wait_until_serving() == {"status": "ok", "replicas_lost": [1]}
    assert httpx.get(running.url + "/health", timeout=60).status_code == 200
    assert recall.ask_all(running.url, recall.problems(3, 3, 256)) == []
    assert running.stop(signal.SIGTERM) == 0


def test_a_drain_lets_both_replicas_finish(two_long_answers: TwoAnswers, slow_steps: SlowSteps) -> None:
    running, answers = two_long_answers
    running.process.send_signal(signal.SIGTERM)
    running.wait_until_draining()
    slow_steps.end()
    for answer in answers:
        assert json.loads(answer.result()[-2])["choices"][0]["finish_reason"] == "length"
    assert running.wait() == 0


def test_with_its_last_replica_the_server_ends_and_names_all(server: StartServer, check_models: Path) -> None:
    running = server(check_models / "recall-gqa", "--dp", "2", *FLAGS)
    for process in running.workers():
        process.kill()
    assert running.wait() == 5
    for number in (0, 1):
        assert f"replica {number}: rank {number} was lost: worker {number} was killed" in running.last_line


def test_the_front_door_streams_from_workers_that_only_pretend_to_compute() -> None:
    with mock_server(2, step_ms=1.0, max_seqs=16) as running:
        measured = load(running.url, num_streams=8, output_len=16, num_processes=1)
        assert measured.metrics.failures == {}
        for replica in (0, 1):
            assert of_replica(running, "plait_generated_tokens_total", replica) > 0
        assert running.stop(signal.SIGTERM) == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--dp", "0"], "--dp is '0'; allowed: a whole number from 1 to 64"),
        (["--dp", "65"], "--dp is '65'; allowed: a whole number from 1 to 64"),
        (["--dp", "2", "--kv-events-endpoint", "tcp://127.0.0.1:65535"], "tcp://127.0.0.1:65536, which cannot be"),
    ],
)
def test_replicas_that_cannot_be_are_refused(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["serve", *words]) == 2
    assert said in capsys.readouterr().err
