"""How near the figures of `plait bench` are to the truth, which a mock server writes down.

    python tests/bench/http/client_truth.py --out tests/bench/results/bench-client-truth.json

Every figure must lie within 2% or 1 ms of the one that follows from the server's own times. Take it on a quiet machine.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
from plait.bench.cases import cases
from plait.bench.compare import value
from plait.bench.measure import Bench, Measured
from plait.bench.metrics import compute_metrics
from plait.bench.result_file import Row, commit, machine, versions
from plait.bench.settings import BenchSettings, LoadSettings, MeasureSettings, PaceSettings

sys.path.insert(0, str(Path(__file__).parents[2]))

from plait_testing.mock_timing import Timing
from plait_testing.running_mock import as_sent, running_mock

SHARE, SECONDS = 0.02, 0.001
"""What a figure may be off, whichever is more."""
LENGTHS = "uniform:20-67"
"""Each answer has its own length, which pairs what was sent with what was seen."""
STREAMS, RATE = PaceSettings(concurrency=8), PaceSettings(rate=20.0)
SCENARIOS = {
    "steady": (Timing(ttft=0.05, itl=0.02), STREAMS),
    "steady, open loop": (Timing(ttft=0.05, itl=0.02), RATE),
    "jittered": (Timing(ttft=0.05, itl=0.02, jitter=0.015), STREAMS),
    "stalls of 2 s": (Timing(ttft=0.05, itl=0.02, stall_at=10, stall=2.0), STREAMS),
    "four tokens a chunk": (Timing(ttft=0.05, itl=0.04, tokens_per_chunk=4), STREAMS),
    "chunks cut in a line": (Timing(ttft=0.05, itl=0.02, cut=0.005), STREAMS),
    "errors": (Timing(ttft=0.05, itl=0.02, fail_every=4, failure="http-500"), STREAMS),
    "slow first token": (Timing(ttft=1.5, itl=0.02), STREAMS),
    "a queue": (Timing(ttft=0.05, itl=0.01, slots=2), RATE),
}
LATENCIES = [
    f"{name}_{column}"
    for name in ("ttft", "tpot", "itl", "itl_token", "e2e")
    for column in ("mean", "p50", "p90", "p99", "max")
]
RATES = ["duration", "requests_per_second", "output_tokens_per_second", "mean_concurrency"]


def measure(timing: Timing, pace: PaceSettings) -> tuple[Measured, Measured]:
    """What the client saw, and the same run by the server's times."""
    load = LoadSettings(num_prompts=48, input_len="32", output_len=LENGTHS)
    settings = BenchSettings(load=load, pace=pace, measure=MeasureSettings(warmup=2))
    with running_mock(timing) as mock:
        bench = Bench(settings, [mock.url])
        seen = bench.measure(cases(settings)[0], bench.servers[0], 0)
        true = as_sent(seen.run, mock.truth())
    return seen, Measured(true, compute_metrics(true, None), seen.client_lag)


def compared(seen: Measured, true: Measured) -> Iterator[tuple[str, float, float, bool]]:
    """Each figure, its truth, and whether the two are near enough."""
    for metric in LATENCIES + RATES:
        ours, theirs = value(seen, metric), value(true, metric)
        if ours is not None and theirs is not None:
            allowed = max(SHARE * abs(theirs), SECONDS if metric not in RATES[1:] else 0.0)
            yield metric, ours, theirs, abs(ours - theirs) <= allowed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows: list[Row] = []
    num_wrong = 0
    for name, (timing, pace) in SCENARIOS.items():
        seen, true = measure(timing, pace)
        wrong = [(metric, ours, theirs) for metric, ours, theirs, is_near in compared(seen, true) if not is_near]
        num_wrong += len(wrong)
        print(f"{name}: {len(wrong)} figures off; client late: {seen.client_lag.reasons or 'no'}", flush=True)
        for metric, ours, theirs in wrong:
            print(f"  {metric}: {ours:.5f}, truly {theirs:.5f}")
        for metric, ours, theirs, _ in compared(seen, true):
            unit = "seconds" if metric not in RATES[1:] else metric.partition("_")[0]
            rows.append(Row(name, metric, unit, ours, theirs))
    if options.out is not None:
        result: dict[str, object] = {
            "commit": commit(),
            "command": f"tests/bench/http/{Path(__file__).name}",
            "machine": machine(),
            "versions": versions(),
            "goal": "what follows from the server's own times",
            "num_off": num_wrong,
            "rows": rows,
        }
        options.out.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")
    sys.exit(num_wrong > 0)


if __name__ == "__main__":
    main()
