"""Replicas that share their experts: the answers of one replica, one end, and refusals that say what works."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx
import psutil
import pytest
from plait_testing import recall
from plait_testing.grouped_engines import GroupFlags, over_ipc, over_tcp, spawn_engines, start_engines
from plait_testing.metrics import read_metrics
from plait_testing.model_mistakes import mistakes_of_the_engine
from plait_testing.recording import Record
from plait_testing.replica_hits import ask_about_one_table
from plait_testing.running_server import START_SECONDS, Server, StartServer, wait_until_ready
from plait_testing.slow_steps import SlowSteps

CONTEXT = 2048
FLAGS = ("--dp-attention", "--max-batch-tokens", "2048", "--threads", "1")
SMALL_POOL = ("--page-size", "16", "--num-pages", "{small_pool}")
ONE_ENGINE: dict[str, tuple[str, ...]] = {
    "dp-2": ("--dp", "2"),
    "dp-2+tp-2": ("--dp", "2", "--tp", "2"),
    "dp-2+no-mixed": ("--dp", "2", "--no-mixed"),
    "dp-4+chunk-64": ("--dp", "4", "--long-prefill-token-threshold", "64"),
    "dp-2+preempted": ("--dp", "2", *SMALL_POOL),
}
SEVERAL_ENGINES: dict[str, tuple[int, tuple[str, ...]]] = {
    "2 engines of 2 replicas": (2, ("--dp", "2")),
    "3 engines+chunk-64": (3, ("--long-prefill-token-threshold", "64")),
    "2 engines of 2 ranks over tcp": (2, ("--tp", "2")),
}
LONG = {"prompt": "count 1 9", "max_tokens": 1500, "ignore_eos": True, "stream": True}


Start = Callable[..., list[Server]]


@pytest.fixture
def start(tmp_path: Path, check_models: Path) -> Iterator[Start]:
    """`start(num_engines, *flags)` starts engines of recall-mla that share experts, with keys over TCP or over ipc."""
    started: list[Server] = []
    ports = ExitStack()

    def begin(num_engines: int, *flags: str, has_keys: bool = False) -> list[Server]:
        meet = ports.enter_context(over_tcp(tmp_path, num_engines)) if has_keys else None
        started.extend(start_engines(tmp_path, check_models / "recall-mla", num_engines, *FLAGS, *flags, meet=meet))
        return started

    with ports:
        yield begin
    for one in started:
        one.kill()


def with_pool(flags: tuple[str, ...], asked: list[recall.Problem]) -> list[str]:
    """The flags, with pages that just hold the longest dialogue."""
    small_pool = -(-(max(map(recall.num_bytes, asked)) + 8) // 16)
    return [flag.format(small_pool=small_pool) for flag in flags]


@pytest.mark.acceptance("cpu")
@pytest.mark.parametrize("variant", ONE_ENGINE)
def test_every_answer_of_replicas_that_share_experts_is_right(
    variant: str, server: StartServer, check_models: Path, sized: Callable[[int, int], int], record: Record
) -> None:
    model, is_preempted = check_models / "recall-mla", "preempted" in variant
    asked = recall.problems(seed=CONTEXT, num=sized(5, 20 if is_preempted else 100), context=CONTEXT)
    running = server(model, *FLAGS, *with_pool(ONE_ENGINE[variant], asked))
    assert running.url, running.errors
    num_writers = sized(0, 4) if is_preempted else 0
    with recall.writers(running.url, num_writers, 400, "recall-mla"):
        wrong = recall.ask_all(running.url, asked, model="recall-mla")
    mistakes = mistakes_of_the_engine(model, asked, wrong)
    record(f"recall-mla dp-attention {variant}", "mistakes_of_the_engine", "problems", len(mistakes), 0)
    assert mistakes == []
    record(
        f"recall-mla dp-attention {variant}", "preemptions", "preemptions", total(running, "plait_preemptions_total")
    )
    assert running.stop() == 0


@pytest.mark.acceptance("cpu")
@pytest.mark.parametrize("variant", SEVERAL_ENGINES)
def test_every_answer_of_engines_that_share_experts_is_right(
    variant: str, start: Start, check_models: Path, sized: Callable[[int, int], int], record: Record
) -> None:
    """The last engine gets one question, the first all others."""
    num_engines, flags = SEVERAL_ENGINES[variant]
    asked = recall.problems(seed=CONTEXT, num=sized(5, 100), context=CONTEXT)
    engines = start(num_engines, *flags, has_keys="tcp" in variant)
    parts = [(engines[0], asked[:-1]), (engines[-1], asked[-1:])]
    with ThreadPoolExecutor(len(parts)) as pool:
        wrong = list(pool.map(lambda part: recall.ask_all(part[0].url, part[1], model="recall-mla"), parts))
    mistakes = [
        mistake
        for (_, part), answers in zip(parts, wrong, strict=True)
        for mistake in mistakes_of_the_engine(check_models / "recall-mla", part, answers)
    ]
    record(f"recall-mla dp-attention {variant}", "mistakes_of_the_engine", "problems", len(mistakes), 0)
    assert mistakes == []
    engines[-1].stop()
    assert [one.wait() for one in engines] == [0] * num_engines


def test_questions_about_one_table_go_where_its_pages_are(server: StartServer, check_models: Path) -> None:
    running = server(check_models / "recall-mla", *FLAGS, "--dp", "2")
    hits = ask_about_one_table(running, seed=3, num=4, context=CONTEXT, model="recall-mla")
    assert sorted(hits)[0] == 0
    assert sorted(hits)[1] > 0


@pytest.mark.parametrize(
    ("model", "flags", "reason"),
    [
        ("recall-gqa", ("--dp", "2"), "no multi-head latent attention (MLA); leave it out and serve free replicas"),
        ("recall-mla", ("--dp", "2", "--itl-target-ms", "30"), "--itl-target-ms times one engine's own steps"),
    ],
)
def test_what_cannot_share_experts_is_refused_with_what_works(
    model: str, flags: tuple[str, ...], reason: str, server: StartServer, check_models: Path
) -> None:
    refused = server(check_models / model, *FLAGS, *flags)
    assert refused.wait() == 2
    assert reason in refused.last_line


def test_engines_that_differ_in_layout_are_refused(tmp_path: Path, check_models: Path) -> None:
    """Not as a rank that waits for others who never come."""
    one, other = (
        spawn_engines(tmp_path, check_models / "recall-mla", 2, "--dp-attention", *flags, engines=[engine])[0]
        for engine, flags in enumerate([(), ("--tp", "2")])
    )
    assert other.wait() == 2
    assert "the configuration of engine 1 is not that of engine 0 in one thing" in other.last_line
    assert "--tp: 1 on engine 0, 2 on engine 1" in other.last_line
    one.kill()


def test_ranks_of_two_groups_in_one_directory_do_not_meet(tmp_path: Path, check_models: Path) -> None:
    first = over_ipc(tmp_path)
    started: list[Server] = []
    try:
        for name, meet in (("first", first), ("second", GroupFlags(f"{first.endpoint}-of-others"))):
            folder = tmp_path / name
            folder.mkdir()
            started += spawn_engines(folder, check_models / "recall-mla", 2, *FLAGS, meet=meet)
        for one in started:
            wait_until_ready(one)
            assert recall.ask_all(one.url, recall.problems(7, 1, 256), model="recall-mla") == []
    finally:
        for one in started:
            one.kill()


@pytest.mark.parametrize("phase", ["loading", "idle", "streaming", "draining"])
def test_a_lost_rank_ends_the_group_by_name(
    phase: str, slow_steps: SlowSteps, tmp_path: Path, check_models: Path
) -> None:
    slow_steps.begin()
    engines = spawn_engines(tmp_path, check_models / "recall-mla", 2, *FLAGS)
    try:
        with ThreadPoolExecutor(1) as pool:
            if phase == "loading":
                wait_for_meeting(tmp_path)
            else:
                for one in engines:
                    wait_until_ready(one)
            reading = pool.submit(stream_long, engines[0].url) if phase in ("streaming", "draining") else None
            if reading is not None:
                wait_for_tokens(engines[0])
            if phase == "draining":
                engines[0].process.send_signal(signal.SIGTERM)
                engines[1].wait_until_draining()
            first_worker(engines[1]).kill()
            if reading is not None:
                assert "error" in json.loads(reading.result()[-1])
        assert [one.wait() for one in engines] == [5, 5]
        assert "rank 0 was lost: worker 0 was killed by SIGKILL" in engines[1].last_line
        assert "engine 1" in engines[0].last_line
    finally:
        for one in engines:
            one.kill()


def test_a_lost_rank_ends_all_replicas_of_its_engine(
    slow_steps: SlowSteps, server: StartServer, check_models: Path
) -> None:
    """No other replica has its experts."""
    running = server(check_models / "recall-mla", *FLAGS, "--dp", "2")
    slow_steps.begin()
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(stream_long, running.url)
        wait_for_tokens(running)
        next(process for process in running.workers() if rank_of(process) == 1).kill()
        assert "error" in json.loads(reading.result()[-1])
    assert running.wait() == 5
    assert "rank 1 was lost: worker 1 was killed by SIGKILL" in running.last_line


def wait_for_meeting(folder: Path) -> None:
    """Until engine 0 listens: of one that ends before, it would never hear."""
    deadline = time.monotonic() + START_SECONDS
    while not (folder / "group" / "votes").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def first_worker(running: Server) -> psutil.Process:
    """Once it is there."""
    deadline = time.monotonic() + START_SECONDS
    while not (workers := running.workers()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return workers[0]


def rank_of(process: psutil.Process) -> int:
    words: list[str] = process.cmdline()
    return int(words[words.index("--rank") + 1])


def stream_long(url: str) -> list[str]:
    """All events of a long answer."""
    with httpx.stream("POST", f"{url}/v1/completions", json=LONG, timeout=120) as got:
        return [line.removeprefix("data: ") for line in got.iter_lines() if line]


def wait_for_tokens(running: Server) -> None:
    """Until an answer has begun."""
    deadline = time.monotonic() + 60
    while total(running, "plait_generated_tokens_total") < 3:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def total(running: Server, name: str) -> float:
    """A counter of all replicas."""
    return sum(value for found, value in read_metrics(running.url).items() if found.startswith(name))
