"""Engines that step together: the same answers as alone, the same sequence of steps, one end."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import msgspec
import pytest
from plait.settings import GroupMembership
from plait_testing import recall
from plait_testing.metrics import read_metrics
from plait_testing.running_server import Server, spawn_server, wait_until_ready

ENGINE = Path(__file__).with_name("grouped_engine.py")
LONG = {"prompt": "count 1 9", "max_tokens": 300, "ignore_eos": True, "stream": True}
StartGroup = Callable[[int], list[Server]]


@pytest.fixture
def group(tmp_path: Path, check_models: Path) -> Iterator[StartGroup]:
    """`group(num_engines)` starts engines of recall-gqa that meet in a directory of their own."""
    started: list[Server] = []

    def start(num_engines: int) -> list[Server]:
        meeting = tmp_path / "group"
        meeting.mkdir(mode=0o700)
        for engine in range(num_engines):
            place = GroupMembership(engine=engine, num_engines=num_engines, endpoint=f"ipc://{meeting}/votes")
            words = [msgspec.json.encode(place).decode(), str(check_models / "recall-gqa")]
            flags = ["--port", "0", "--threads", "1", "--max-model-len", "1024"]
            started.append(spawn_server(tmp_path / f"engine-{engine}.log", str(ENGINE), *words, *flags))
        for one in started:
            wait_until_ready(one)
            assert one.url, one.errors
        return started

    yield start
    for one in started:
        one.kill()


def steps(running: Server) -> dict[str, float]:
    """The last agreed step, and the replica's steps with rows and without."""
    metrics = read_metrics(running.url)
    kinds = [metrics[f'plait_steps_total{{kind="{kind}"}}'] for kind in ("prefill", "decode", "mixed")]
    return {
        "agreed": metrics["plait_group_step"],
        "own": sum(kinds),
        "dummy": metrics["plait_group_dummy_steps_total"],
    }


def settled(servers: list[Server]) -> list[dict[str, float]]:
    """The same, once no engine steps any more."""
    deadline = time.monotonic() + 30
    before: list[dict[str, float]] = []
    while (now := [steps(one) for one in servers]) != before and time.monotonic() < deadline:
        before = now
        time.sleep(0.2)
    return now


def num_generated(running: Server) -> float:
    return read_metrics(running.url)["plait_generated_tokens_total"]


def begin_long(running: Server, pool: ThreadPoolExecutor) -> Callable[[], list[str]]:
    """A long streamed answer that has begun; call what this returns for all of its events."""
    begun: list[str] = []
    enough = num_generated(running) + 3

    def read() -> list[str]:
        with httpx.stream("POST", f"{running.url}/v1/completions", json=LONG, timeout=120) as got:
            begun.extend(line.removeprefix("data: ") for line in got.iter_lines() if line)
        return begun

    reading = pool.submit(read)
    deadline = time.monotonic() + 60
    while num_generated(running) < enough and time.monotonic() < deadline:
        time.sleep(0.02)
    return reading.result


def test_a_group_under_uneven_load_answers_as_alone_in_lockstep_and_drains_as_one(
    group: StartGroup,
) -> None:
    servers = group(3)
    asked = recall.problems(11, 6, 512)
    with ThreadPoolExecutor(2) as pool:
        wrong = list(
            pool.map(
                lambda part: recall.ask_all(part[0].url, part[1]), [(servers[0], asked[:5]), (servers[1], asked[5:])]
            )
        )
    assert wrong == [[], []]
    counts = settled(servers)
    assert len({count["agreed"] for count in counts}) == 1, counts
    assert len({count["own"] + count["dummy"] for count in counts}) == 1, counts
    assert counts[2]["own"] == 0
    assert counts[2]["dummy"] > 0
    with ThreadPoolExecutor(1) as pool:
        answer = begin_long(servers[0], pool)
        servers[1].process.send_signal(signal.SIGTERM)
        events = answer()
    assert json.loads(events[-2])["choices"][0]["finish_reason"] == "length"
    assert [one.wait() for one in servers] == [0, 0, 0]


def test_a_graph_larger_than_a_step_is_refused_at_start(tmp_path: Path, check_models: Path) -> None:
    place = GroupMembership(engine=0, num_engines=1, endpoint="", graph_buckets=(8, 256))
    words = [msgspec.json.encode(place).decode(), str(check_models / "recall-gqa")]
    flags = ["--port", "0", "--max-batch-tokens", "200"]
    engine = spawn_server(tmp_path / "engine.log", str(ENGINE), *words, *flags)
    assert engine.wait() == 2
    assert "graph_buckets has 256, and a step has at most 200 tokens (--max-batch-tokens)" in engine.last_line


def test_a_killed_engine_ends_the_others_which_name_it(group: StartGroup) -> None:
    servers = group(2)
    with ThreadPoolExecutor(1) as pool:
        answer = begin_long(servers[0], pool)
        servers[1].process.kill()
        events = answer()
    assert "error" in json.loads(events[-1])
    assert servers[0].wait() == 5
    assert "engine 1 (replica 1) is gone" in servers[0].last_line
