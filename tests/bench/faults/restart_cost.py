"""What being able to start lost ranks again costs while none is lost, on CPUs.

    PYTHONPATH=tests python tests/bench/faults/restart_cost.py --out tests/bench/results/restart-cost.json

Two servers of a model, one with `--restart never` and one with `--restart group`, run at once and get the same closed
loops in turns, each first in every second round. Ratios are those of a round: the median, and the quartiles as its
spread. Then the memory: what the spare processes hold, and what the engine's process grows by for each token of streams
that run, with mock workers and without the prefix cache.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
from bench.dp.front_door import mock_server
from bench.faults.observe import metric
from plait.bench.cases import cases
from plait.bench.measure import Bench
from plait.bench.result_file import Row, commit, machine, versions
from plait.bench.settings import BenchSettings, LoadSettings, MeasureSettings, PaceSettings
from plait.model_files import find_model
from plait_testing.running_server import Server, start_server

RECALL = Path(__file__).resolve().parents[2] / "models" / "recall-gqa"
MODELS = {"SmolLM2": None, "recall-gqa": RECALL}
FLAGS = ("--max-model-len", "1024", "--max-seqs", "8")
POLICIES = ("never", "group")
STREAMS = (1, 8)
GOAL = 0.99
"""Of the rate without."""
KEPT_STREAMS = 128
WARM_UP_LEN = 64
"""What grows once has grown then."""
GENERATED = "plait_generated_tokens_total"
KEPT_FROM, KEPT_TO = 0.3, 0.95
"""Shares of the tokens between which memory is compared: all streams run."""


@contextlib.contextmanager
def server(folder: Path, model: str, policy: str) -> Iterator[Server]:
    log = folder / f"{model}-{policy}.log"
    running = start_server(log, MODELS[model] or find_model(None).path, *FLAGS, "--restart", policy)
    try:
        if not running.url:
            raise RuntimeError(f"the server did not start: {running.last_line}")
        yield running
    finally:
        running.kill()


def rate(url: str, num_streams: int, output_len: int, num_each: int = 2) -> float:
    """Tokens a second of a closed loop in which every stream sends so many requests."""
    num_prompts, length = num_each * num_streams, str(output_len)
    load = LoadSettings(num_prompts=num_prompts, input_len="16", output_len=length, token_range="40-80", salt="mock")
    pace, measuring = PaceSettings(concurrency=num_streams), MeasureSettings(processes=1)
    settings = BenchSettings(load=load, pace=pace, measure=measuring)
    bench = Bench(settings, [url])
    return bench.measure(cases(settings)[0], bench.servers[0], 0).metrics.output_tokens_per_second


def compare(sides: dict[str, Server], model: str, num_streams: int, options: argparse.Namespace) -> Iterator[Row]:
    """The rates of both servers, in turns."""
    rates: defaultdict[str, list[float]] = defaultdict(list)
    for turn in range(options.rounds):
        for policy in POLICIES[:: 1 if turn % 2 == 0 else -1]:
            rates[policy].append(rate(sides[policy].url, num_streams, options.output_len))
    case = f"{model}, {num_streams} streams"
    for policy, found in rates.items():
        yield Row(f"{case}, --restart {policy}", "output_tokens_per_second", "tokens/s", statistics.median(found))
    ratios = [group / never for group, never in zip(rates["group"], rates["never"], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    yield Row(f"{case}, group over never", "rate", "ratio", middle, GOAL)
    yield Row(f"{case}, group over never", "rate_quartiles_apart", "ratio", high - low)


def measure_model(model: str, options: argparse.Namespace) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        sides = {policy: stack.enter_context(server(Path(folder), model, policy)) for policy in POLICIES}
        spares = wait_for_spares(sides["group"])
        for side in sides.values():
            rate(side.url, max(STREAMS), options.output_len)
        for num_streams in STREAMS:
            yield from compare(sides, model, num_streams, options)
        held = sum(spare.memory_full_info().pss for spare in spares)
        yield Row(f"{model}, --restart group", "spares_memory", "bytes", float(held))


def wait_for_spares(running: Server) -> list[psutil.Process]:
    """Until they have imported what a rank needs and wait: importing takes processor time."""
    deadline = time.monotonic() + 120
    while not (spares := running.spares()) or any(spare.cpu_percent(0.5) > 1 for spare in spares):
        if time.monotonic() > deadline:
            raise TimeoutError("no spare process waits")
    return spares


def kept_bytes(output_len: int) -> float:
    """Of a token of a stream that runs, in the engine's process: how much more it has late than early."""
    with mock_server(1, 0.5, KEPT_STREAMS, "--no-prefix-cache") as running:
        rate(running.url, KEPT_STREAMS, WARM_UP_LEN, 1)
        with watched(running) as points:
            rate(running.url, KEPT_STREAMS, output_len, 1)
    total = KEPT_STREAMS * output_len
    few, early = next(point for point in points if point[0] >= KEPT_FROM * total)
    many, late = next(point for point in points if point[0] >= KEPT_TO * total)
    return (late - early) / (many - few)


@contextlib.contextmanager
def watched(running: Server) -> Iterator[list[tuple[float, int]]]:
    """Tokens generated within, with the memory of the engine's process at that time."""
    points: list[tuple[float, int]] = []
    engine, before, over = psutil.Process(running.process.pid), metric(running.url, GENERATED), threading.Event()

    def watch() -> None:
        while not over.wait(0.2):
            points.append((metric(running.url, GENERATED) - before, engine.memory_info().rss))

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        yield points
    finally:
        over.set()
        watching.join()


def measure(options: argparse.Namespace) -> Iterator[Row]:
    """A row for each figure."""
    for model in options.model or MODELS:
        yield from measure_model(model, options)
    yield Row(f"mock workers, {KEPT_STREAMS} streams", "kept_token_memory", "bytes", kept_bytes(options.kept_len))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, action="append")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--output-len", type=int, default=256)
    parser.add_argument("--kept-len", type=int, default=7500)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = []
    for row in measure(options):
        rows.append(row)
        print(json.dumps(msgspec.to_builtins(row)), flush=True)
    if options.out is not None:
        command = f"tests/bench/faults/{Path(__file__).name} {' '.join(sys.argv[1:])}".strip()
        result = {"commit": commit(), "command": command, "machine": machine(), "versions": versions(), "rows": rows}
        options.out.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")


if __name__ == "__main__":
    main()
