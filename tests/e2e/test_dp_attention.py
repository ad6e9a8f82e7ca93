"""Engines whose replicas share their experts: the answers of one replica, one end, and refusals that say what works."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from plait_testing import recall
from plait_testing.grouped_engines import spawn_engines, start_engines
from plait_testing.metrics import read_metrics
from plait_testing.model_mistakes import mistakes_of_the_engine
from plait_testing.recording import Record
from plait_testing.running_server import Server, wait_until_ready

CONTEXT = 2048
FLAGS = ("--dp-attention", "--max-batch-tokens", "2048")
# Engines, and what differs from the defaults.
VARIANTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "2": (2, ()),
    "4": (4, ()),
    "2 of 2 ranks": (2, ("--tp", "2")),
    "2 no-mixed": (2, ("--no-mixed",)),
    "2 chunk-64": (2, ("--long-prefill-token-threshold", "64")),
    "2 preempted": (2, ("--page-size", "16", "--num-pages", "{small_pool}")),
}
Start = Callable[..., list[Server]]


@pytest.fixture
def start(tmp_path: Path, check_models: Path) -> Iterator[Start]:
    """`start(num_engines, *flags)` starts engines of recall-mla that share experts."""
    started: list[Server] = []

    def begin(num_engines: int, *flags: str) -> list[Server]:
        started.extend(start_engines(tmp_path, check_models / "recall-mla", num_engines, *FLAGS, *flags))
        return started

    yield begin
    for one in started:
        one.kill()


@pytest.mark.acceptance("cpu")
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_answer_of_replicas_that_share_experts_is_right(
    variant: str, start: Start, check_models: Path, sized: Callable[[int, int], int], record: Record
) -> None:
    """The last engine gets one question, and with four engines the third gets none."""
    num_engines, flags = VARIANTS[variant]
    asked = recall.problems(seed=CONTEXT, num=sized(5, 100), context=CONTEXT)
    small_pool = str(-(-(max(map(recall.num_bytes, asked)) + 8) // 16))
    engines = start(num_engines, *(flag.format(small_pool=small_pool) for flag in flags))
    parts = [asked[: -(-len(asked) // 2)], asked[-(-len(asked) // 2) : -1], [], [asked[-1]]]
    if num_engines == 2:
        parts = [asked[:-1], [asked[-1]]]
    with ThreadPoolExecutor(num_engines) as pool:
        wrong = pool.map(
            lambda of: recall.ask_all(of[0].url, of[1], model="recall-mla"), zip(engines, parts, strict=True)
        )
        found = [
            mistake
            for part, answers in zip(parts, wrong, strict=True)
            for mistake in mistakes_of_the_engine(check_models / "recall-mla", part, answers)
        ]
    record(f"recall-mla dp-attention {variant}", "answers_wrong", "answers", len(found), 0)
    assert found == []
    if "preempted" in variant and len(asked) > 20:
        assert sum(read_metrics(one.url)["plait_preemptions_total"] for one in engines) > 0
    engines[-1].stop()
    assert [one.wait() for one in engines] == [0] * num_engines


def test_a_prefix_is_found_again_in_the_cache_of_its_replica(start: Start) -> None:
    engines = start(2)
    asked = recall.about_one_table(3, 4, CONTEXT)
    for question in asked:
        assert recall.ask_all(engines[1].url, [question], model="recall-mla") == []
    assert read_metrics(engines[1].url)["plait_prefix_hit_tokens_total"] > 0
    assert read_metrics(engines[0].url)["plait_prefix_hit_tokens_total"] == 0


def test_a_model_without_mla_or_experts_is_refused_with_what_to_do(tmp_path: Path, check_models: Path) -> None:
    (refused,) = spawn_engines(tmp_path, check_models / "recall-gqa", 1, "--dp-attention")
    assert refused.wait() == 2
    assert "has no multi-head latent attention (MLA); leave it out and serve free replicas" in refused.last_line


def test_engines_that_differ_in_layout_are_refused(tmp_path: Path, check_models: Path) -> None:
    """Not as a rank that waits for others who never come."""
    one, other = (
        spawn_engines(tmp_path, check_models / "recall-mla", 2, "--dp-attention", *flags, engines=[engine])[0]
        for engine, flags in enumerate([(), ("--tp", "2")])
    )
    assert other.wait() == 2
    assert "the configuration of engine 1 is not that of engine 0" in other.last_line
    one.kill()


LONG = {"prompt": "count 1 9", "max_tokens": 1500, "ignore_eos": True, "stream": True}


@pytest.mark.parametrize("phase", ["loading", "idle", "streaming"])
def test_a_lost_rank_ends_the_group_by_name(phase: str, tmp_path: Path, check_models: Path) -> None:
    engines = spawn_engines(tmp_path, check_models / "recall-mla", 2, *FLAGS)
    try:
        if phase == "loading":
            deadline = time.monotonic() + 60
            while not (workers := engines[1].workers()) and time.monotonic() < deadline:
                time.sleep(0.05)
            workers[0].kill()
        else:
            for one in engines:
                wait_until_ready(one)
            with ThreadPoolExecutor(1) as pool:
                reading = pool.submit(stream_long, engines[0].url) if phase == "streaming" else None
                if reading is not None:
                    wait_for_tokens(engines[0])
                engines[1].workers()[0].kill()
                if reading is not None:
                    assert "error" in json.loads(reading.result()[-1])
        assert [one.wait() for one in engines] == [5, 5]
        assert "rank 0 was lost: worker 0 was killed by SIGKILL" in engines[1].last_line
        assert "engine 1" in engines[0].last_line
    finally:
        for one in engines:
            one.kill()


def stream_long(url: str) -> list[str]:
    """All events of a long answer."""
    with httpx.stream("POST", f"{url}/v1/completions", json=LONG, timeout=120) as got:
        return [line.removeprefix("data: ") for line in got.iter_lines() if line]


def wait_for_tokens(running: Server) -> None:
    deadline = time.monotonic() + 60
    while read_metrics(running.url)["plait_generated_tokens_total"] < 3 and time.monotonic() < deadline:
        time.sleep(0.02)
