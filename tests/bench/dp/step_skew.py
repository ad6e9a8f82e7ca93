"""How far apart the replicas of a group begin a step, and what replicas without requests cost a stream.

    python tests/bench/dp/step_skew.py --out tests/bench/results/dp-step-skew.json

`plait serve --dp N --dp-attention` with `mock_worker.py` in place of the workers: each replica takes `--step-ms` a step
and exchanges nothing, so what is measured is the engine alone. One stream runs, then one a replica. A step's skew is
the time from the first rank that gets its plan to the last one. The mean time between the tokens of a stream, less the
step itself, is what agreeing and planning cost; beside that of a replica alone it is the cost of the idle ones.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import msgspec
import numpy as np
from plait.bench.result_file import Row, commit, machine, versions

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.dp.front_door import mock_server

PROMPT = list(range(40, 56))


def stream(url: str, num_tokens: int) -> list[float]:
    """Arrival times of a stream's tokens."""
    body = {"prompt": PROMPT, "max_tokens": num_tokens, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=600) as got:
        got.raise_for_status()
        return [time.monotonic() for line in got.iter_lines() if line.startswith("data: {")]


def skews(folder: Path) -> list[float]:
    """Seconds between the first and the last plan of each step that all ranks got."""
    of_ranks = [dict(json.loads(file.read_text())) for file in folder.glob("arrivals-*.json")]
    common = set.intersection(*(set(each) for each in of_ranks))
    return [max(times) - min(times) for step in sorted(common) if (times := [each[step] for each in of_ranks])]


def measure(options: argparse.Namespace) -> Iterator[Row]:
    for num_replicas in options.replicas:
        flags = ("--dp-attention",) if num_replicas > 1 else ()
        for num_streams in sorted({1, num_replicas}):
            case = f"dp {num_replicas}, steps of {options.step_ms:g} ms, {num_streams} streams"
            with tempfile.TemporaryDirectory() as name:
                os.environ["MOCK_TIMES"] = name
                with mock_server(num_replicas, options.step_ms, 8, *flags) as running:
                    with ThreadPoolExecutor(num_streams) as pool:
                        times = list(pool.map(lambda _: stream(running.url, options.output_len), range(num_streams)))
                    assert running.stop() == 0
                gaps = [(each[-1] - each[0]) / (len(each) - 1) for each in times]
                yield Row(case, "gap_beyond_step", "seconds", float(np.mean(gaps)) - options.step_ms / 1e3)
                found = skews(Path(name))
                for percent in (50, 99) if num_replicas > 1 else ():
                    yield Row(case, f"step_skew_p{percent}", "seconds", float(np.percentile(found, percent)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--step-ms", type=float, default=10.0)
    parser.add_argument("--output-len", type=int, default=500)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = []
    for row in measure(options):
        print(json.dumps(msgspec.to_builtins(row)), flush=True)
        rows.append(row)
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
