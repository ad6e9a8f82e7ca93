"""What routing by cached prefix is worth on conversations, against round-robin and the fewest open requests.

    python tests/bench/simulate/routing.py --out tests/bench/results/simulate-routing.json

Conversations of eight turns on replicas of Qwen3-8B with an H200 each, in virtual time.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
from plait.bench.result_file import Row, commit, machine, versions
from plait.simulate.command import run
from plait.simulate.settings import ClusterSettings, LoadSettings, Routing, SimulateSettings

ROUTINGS: tuple[Routing, ...] = ("in-turn", "least-loaded", "prefix-aware")
RATES = {2: (8.0, 16.0, 32.0), 4: (16.0, 32.0), 8: (32.0, 64.0)}
"""Requests a second by number of replicas."""
PERCENTILES = ("p50", "p90", "p99")


def measure(num_prompts: int) -> Iterator[Row]:
    """Hit ratio, TTFT and ITL of each case."""
    for replicas, rates in RATES.items():
        for rate in rates:
            for routing in ROUTINGS:
                case = f"{replicas} replicas, {rate:g} requests/s, {routing}"
                load = LoadSettings(trace="conversations", rate=rate, num_prompts=num_prompts)
                cluster = ClusterSettings(replicas=replicas, routing=routing)
                summary = run(SimulateSettings(load=load, cluster=cluster), case).summary
                yield Row(case, "prefix_hit_ratio", "1", summary.prefix_hit_ratio)
                for name in PERCENTILES:
                    yield Row(case, f"ttft_{name}", "seconds", getattr(summary.ttft_seconds, name))
                    yield Row(case, f"itl_{name}", "seconds", getattr(summary.itl_seconds, name))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-prompts", type=int, default=4000)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = list(measure(options.num_prompts))
    for row in rows:
        print(f"{row.case}: {row.metric} {row.value:.4f}")
    if options.out is not None:
        result = {
            "commit": commit(),
            "command": f"tests/bench/simulate/{Path(__file__).name} {' '.join(sys.argv[1:])}".strip(),
            "machine": machine(),
            "versions": versions(("plait", "msgspec")),
            "rows": rows,
        }
        options.out.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")


if __name__ == "__main__":
    main()
