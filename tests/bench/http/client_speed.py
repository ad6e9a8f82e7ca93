"""How many streamed tokens a second `plait bench` reads without being late, beside a mock server on the same cores.

    python tests/bench/http/client_speed.py --out tests/bench/results/bench-client-speed.json

The mock sends one token an event to every stream, at a rate that is `--tokens-per-second` in all. Take it on a quiet
machine; `taskset -c 0,1` holds it to two cores.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import msgspec
from plait.bench.cases import cases
from plait.bench.measure import Bench, Measured
from plait.bench.result_file import record
from plait.bench.settings import BenchSettings, LoadSettings, MeasureSettings, PaceSettings
from plait.bench.table import table

sys.path.insert(0, str(Path(__file__).parents[2]))

from plait_testing.mock_timing import Timing
from plait_testing.running_mock import running_mock

GOAL = 50_000.0
"""Tokens a second at 256 streams on two cores, the mock's share included."""


def measure(num_streams: int, tokens_per_second: float, seconds: float, num_processes: int) -> Measured:
    """A closed loop in which every stream sends two requests."""
    itl = num_streams / tokens_per_second
    settings = BenchSettings(
        load=LoadSettings(num_prompts=2 * num_streams, input_len="16", output_len=str(round(seconds / 2 / itl))),
        pace=PaceSettings(concurrency=num_streams),
        measure=MeasureSettings(processes=num_processes),
    )
    with running_mock(Timing(ttft=itl, itl=itl)) as mock:
        bench = Bench(settings, [mock.url])
        return bench.measure(cases(settings)[0], bench.servers[0], 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens-per-second", type=float, default=55_000)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    measured = measure(options.streams, options.tokens_per_second, options.seconds, options.processes)
    print(table(measured))
    late = measured.client_lag
    print(f"the client's own lateness: {msgspec.json.encode(late).decode()}")
    if options.out is not None:
        result = record(f"tests/bench/http/{Path(__file__).name}", [measured], [], with_requests=False)
        options.out.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")
    is_fast = measured.metrics.output_tokens_per_second >= GOAL and not late.reasons
    print(f"{measured.metrics.output_tokens_per_second:.0f} tokens/s; goal: {GOAL:.0f}, and not late: {is_fast}")
    sys.exit(not is_fast)


if __name__ == "__main__":
    main()
