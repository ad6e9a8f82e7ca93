"""What a server with `--otlp-traces-endpoint` takes more than one without, over workers that only pretend to compute.

    python tests/bench/http/traces.py --out tests/bench/results/traces.json

Both servers run at once and get the same loads in turns: long streams, where a span is shared by many tokens, and short
requests of one token, where each pays for its own. The collector is a process of this machine. Rates depend on what
else runs; processor time of the engine's process hardly does, and a round's holds the export of its spans. Figures are
medians over the rounds, ratios medians of the rounds' ratios. A round whose client was late is counted.
`--server-core N` holds both servers to one core.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
from plait.bench.cases import cases
from plait.bench.measure import Bench, Measured
from plait.bench.result_file import Row, commit, machine, versions
from plait.bench.settings import BenchSettings, LoadSettings, MeasureSettings, PaceSettings

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.dp.front_door import cpu_seconds, hold_to_core, mock_server
from plait_testing.collector import collector
from plait_testing.metrics import read_metrics
from plait_testing.running_server import Server

TOKENS, REQUESTS = "plait_generated_tokens_total", "plait_requests_finished_total"
SENT_SECONDS = 60.0
"""For the last spans: they go together, every 5 s."""


@dataclass(frozen=True)
class Load:
    """One load of both servers."""

    name: str
    num_requests: int
    output_len: int
    unit: str
    """What the processor time is divided by."""
    counter: str
    """The server's count of those."""


@dataclass
class Figures:
    """Of one server under one load, a value a round."""

    rates: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    num_late: int = 0


@dataclass(frozen=True)
class Side:
    """One of the servers."""

    running: Server
    collected: Connection | None
    """Where its collector is asked."""

    def count(self, counter: str) -> float:
        return sum(value for name, value in read_metrics(self.running.url).items() if name.split("{")[0] == counter)

    def num_lost(self) -> float:
        """Spans that have not come; waits a while for them."""
        if self.collected is None:
            return 0.0
        num_requests, deadline = self.count(REQUESTS), time.monotonic() + SENT_SECONDS
        while (lost := num_requests - self._num_spans(self.collected)) > 0 and time.monotonic() < deadline:
            time.sleep(0.2)
        return lost

    def _num_spans(self, collected: Connection) -> int:
        collected.send(True)
        came: int = collected.recv()
        return came


def collect(pipe: Connection) -> None:
    """A collector's process: it tells its address, then how many spans it has whenever it is asked."""
    with collector() as taken:
        pipe.send(taken.url)
        while pipe.recv():
            pipe.send(len(taken.spans))


@contextlib.contextmanager
def collecting() -> Iterator[tuple[str, Connection]]:
    """The address of a collector, and where it is asked."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=collect, args=(theirs,))
    process.start()
    try:
        yield ours.recv(), ours
    finally:
        ours.send(False)
        process.join()


def run(url: str, load: Load, num_streams: int) -> Measured:
    """A closed loop."""
    settings = BenchSettings(
        load=LoadSettings(
            num_prompts=load.num_requests,
            input_len="16",
            output_len=str(load.output_len),
            token_range="40-80",
            salt="mock",
        ),
        pace=PaceSettings(concurrency=num_streams),
        measure=MeasureSettings(processes=1),
    )
    bench = Bench(settings, [url])
    return bench.measure(cases(settings)[0], bench.servers[0], 0)


def measure_round(side: Side, load: Load, num_streams: int, figures: Figures) -> None:
    before, counted = sum(cpu_seconds(side.running.process.pid).values()), side.count(load.counter)
    measured = run(side.running.url, load, num_streams)
    side.num_lost()
    seconds = sum(cpu_seconds(side.running.process.pid).values()) - before
    figures.cpu.append(seconds / (side.count(load.counter) - counted))
    metrics = measured.metrics
    figures.rates.append(metrics.output_tokens_per_second if load.unit == "token" else metrics.requests_per_second)
    figures.num_late += bool(measured.client_lag.reasons)


def measure(options: argparse.Namespace) -> Iterator[Row]:
    """A row for each figure."""
    streams, length = options.streams, options.output_len
    loads = [
        Load(f"{streams} streams of {length} tokens", 2 * streams, length, "token", TOKENS),
        Load(f"requests of one token, {streams} at a time", options.requests, 1, "request", REQUESTS),
    ]
    with contextlib.ExitStack() as stack:
        url, pipe = stack.enter_context(collecting())
        sides = {
            traces: Side(stack.enter_context(mock_server(1, options.step_ms, streams, *more)), collected)
            for traces, more, collected in (("off", (), None), ("on", ("--otlp-traces-endpoint", url), pipe))
        }
        if options.server_core is not None:
            for side in sides.values():
                hold_to_core(side.running.process.pid, options.server_core)
        for load in loads:
            yield from measure_load(sides, load, options)
        yield Row("traces on", "spans_lost", "spans", sides["on"].num_lost(), 0.0)


def measure_load(sides: dict[str, Side], load: Load, options: argparse.Namespace) -> Iterator[Row]:
    """On both servers, in turns."""
    figures: defaultdict[str, Figures] = defaultdict(Figures)
    for _ in range(options.rounds):
        for traces, side in sides.items():
            measure_round(side, load, options.streams, figures[traces])
    for traces, own in figures.items():
        case = f"traces {traces}, {load.name}"
        yield Row(case, f"{load.unit}s_per_second", f"{load.unit}s/s", statistics.median(own.rates))
        yield Row(case, f"engine_cpu_per_{load.unit}", "seconds", statistics.median(own.cpu))
        yield Row(case, "client_was_late", "rounds", float(own.num_late))
    yield from ratios(load, figures["on"], figures["off"])


def ratios(load: Load, on: Figures, off: Figures) -> Iterator[Row]:
    """Traces on over off."""
    case = f"traces on over off, {load.name}"
    for metric, many, few in (
        (f"{load.unit}s_per_second", on.rates, off.rates),
        (f"engine_cpu_per_{load.unit}", on.cpu, off.cpu),
    ):
        yield Row(case, metric, "ratio", statistics.median(a / b for a, b in zip(many, few, strict=True)))


def main() -> None:
    options = parse(sys.argv[1:])
    rows = list(measure(options))
    for row in rows:
        print(json.dumps(msgspec.to_builtins(row)))
    if options.out is not None:
        result = {
            "commit": commit(),
            "command": f"tests/bench/http/{Path(__file__).name} {' '.join(sys.argv[1:])}".strip(),
            "machine": machine(),
            "versions": versions(("plait", "msgspec", "opentelemetry-sdk")),
            "rows": rows,
        }
        options.out.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")


def parse(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--output-len", type=int, default=512)
    parser.add_argument("--requests", type=int, default=4096)
    parser.add_argument("--step-ms", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--server-core", type=int)
    parser.add_argument("--out", type=Path)
    return parser.parse_args(words)


if __name__ == "__main__":
    main()
