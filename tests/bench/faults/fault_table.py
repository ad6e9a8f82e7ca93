"""The fault table's rows: what a fault costs, and that nothing is lost. `lost_ranks.py` has two more.

PYTHONPATH=tests python tests/bench/faults/fault_table.py --runs 20 --out tests/bench/results/faults.json
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from bench.faults import client_faults, clock_jumps, cut_nodes, engine_faults, rank_faults, short_resources
from bench.faults.fault_rows import LOSSES, Fault, row, write_record

FAULTS: dict[str, Fault] = {
    "worker out of memory": rank_faults.out_of_memory,
    "worker that answers garbage": rank_faults.garbage,
    "poisoned request": rank_faults.poisoned_request,
    "engine kill -9": engine_faults.engine_killed,
    "rolling drain": engine_faults.rolling_drain,
    "1,000 disconnects": client_faults.disconnects,
    "slow client": client_faults.slow_client,
    "no file descriptors": client_faults.no_descriptors,
    "KV exhaustion": short_resources.kv_exhaustion,
    "disk full": short_resources.full_disk,
    "clock jumps": clock_jumps.clock_jumps,
    "partition between nodes": cut_nodes.partition,
    "half-open TCP between nodes": cut_nodes.half_open,
}


def measure(name: str, runs: int) -> dict[str, object]:
    """Strike so often."""
    with tempfile.TemporaryDirectory() as folder, FAULTS[name](Path(folder)) as run:
        return row([run() for _ in range(runs)], fault=name)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--fault", choices=FAULTS, action="append")
    parser.add_argument("--note", default="", help="what else ran on the machine")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(argv)
    rows = []
    for name in options.fault or FAULTS:
        began = time.monotonic()
        rows.append(measure(name, options.runs))
        print(json.dumps(rows[-1]), f"({time.monotonic() - began:.0f} s)", flush=True)
        write_record(options.out, rows, note=options.note)
    return int(any(each.get(name) for each in rows for name in LOSSES))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
