"""What agreeing on a step costs 2 to 64 replicas: the decision alone, threads of one engine, engines over ZeroMQ.

    python tests/bench/dp/vote_latency.py --out tests/bench/results/dp-vote-latency.json

Runs `router/engine/examples/vote_cost.rs`. Engines are threads with a ZeroMQ context each: on fewer cores than engines
they wait for each other.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
from plait.bench.result_file import Row, commit, machine, versions

ROOT = Path(__file__).resolve().parents[3]
NUMBERS = (2, 4, 8, 16, 32, 64)


def measure(numbers: list[int]) -> Iterator[Row]:
    """A row for the median and the 99th percentile of each case, in seconds."""
    command = ["cargo", "run", "--release", "--quiet", "--locked", "-p", "plait-engine", "--example", "vote_cost", "--"]
    words = [*command, *map(str, numbers)]
    process = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        print(line, end="", flush=True)
        found = json.loads(line)
        for percentile in ("p50", "p99"):
            yield Row(found["case"], percentile, "seconds", found[percentile] * 1e-6)
    if process.wait() != 0:
        raise RuntimeError(f"{' '.join(words)} ended with {process.returncode}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--numbers", type=int, nargs="+", default=NUMBERS)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = list(measure(list(options.numbers)))
    if options.out is not None:
        result = {
            "commit": commit(),
            "command": f"tests/bench/dp/{Path(__file__).name} {' '.join(sys.argv[1:])}".strip(),
            "machine": machine(),
            "versions": versions(("plait",)),
            "rows": rows,
        }
        options.out.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")


if __name__ == "__main__":
    main()
