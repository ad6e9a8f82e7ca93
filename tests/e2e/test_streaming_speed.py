"""The bench of the front door's speed: it counts every token, and ties each one that it parses to the worker's send.

At a size at which its times mean nothing.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from bench.http.streaming_speed import Door, measure, measure_door, other_doors, parse

# What it measures needs cores that nobody else has.
pytestmark = pytest.mark.slow
WORDS = ["--streams=3", "--offered=2000", "--seconds=2"]


def test_the_bench_measures_full_and_half_load(demo_gguf: Path) -> None:
    cores = os.sched_getaffinity(0)
    held = [str(core) for core in (min(cores), max(cores))]
    rows = list(measure(parse([*WORDS, "--beside=0", "--cores", *held])))
    values = {(row.case, row.metric): row.value for row in rows}
    for case in ("3 streams", "3 streams, half load"):
        assert values[case, "output_tokens_per_second"] > 0
        assert values[case, "chunks_of_one_token"] == values[case, "tokens_per_chunk"] == 1
        assert 0 < values[case, "added_latency_p50"] <= values[case, "added_latency_p99"]
        assert 0 < values[case, "plait-writer_cpu_per_token"] < values[case, "cpu_per_token"]
    assert os.sched_getaffinity(0) == cores


@pytest.mark.parametrize("number", [0, 1], ids=["TLS", "traces"])
def test_the_bench_measures_streams_and_short_chats_at_another_door(demo_gguf: Path, number: int) -> None:
    options = parse([*WORDS, "--cores", *[str(min(os.sched_getaffinity(0)))] * 2])
    with other_doors() as doors:
        door: Door = doors[number]
        streamed, sends, chats = measure_door(door, 3, options.offered, options, with_chats=True)
    latencies = [row.value for row in streamed.latency_rows("", sends, None)]
    assert streamed.single_share == 1
    assert 0 < latencies[0] <= latencies[1]
    values = {row.metric: row.value for row in chats}
    assert values["requests_per_second"] > 0
    assert 0 < values["main_cpu_per_request"] < values["cpu_per_request"]
