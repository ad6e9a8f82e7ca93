"""What constrained answers cost, and what one slow grammar costs the others, on a CPU.

    python tests/bench/http/constrained.py --out tests/bench/results/constrained.json

The demo model answers eight streams at a time, greedily. Rates: eight free streams and eight under a JSON schema, in
turn. Gaps: seven free streams beside a free one, and beside one whose grammar is so ambiguous that a mask takes long,
in turn; the gaps between tokens of the seven count, from their second token on. Ratios are medians of the rounds'.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import msgspec
from plait.bench.result_file import Row, commit, machine, versions

sys.path.insert(0, str(Path(__file__).parents[2]))

from plait_testing.metrics import read_metrics
from plait_testing.running_server import Server, start_server

NUM_STREAMS = 8
NUM_PROMPT = 64
NUM_TOKENS = 96
SERVER = ("--max-model-len", "2048", "--max-seqs", "16")
SCHEMA = {"type": "array", "items": {"type": "string", "maxLength": 40}, "minItems": 1000}
"""No answer of these lengths is complete."""
LEAST_RATE = 0.92
MOST_P99 = 1.1
MOST_LONGEST = 1.5


def slow_grammar(width: int) -> str:
    """Texts of letters, divided in every way into words of so many: a mask looks at each."""
    return f"root ::= text\ntext ::= text text | [a-z ]{{1,{width}}}\n"


@dataclass(slots=True)
class Load:
    """Streams that run at a time, and what was seen of those that count."""

    server: Server
    gaps: list[float] = field(default_factory=list)
    num_tokens: int = 0
    seconds: float = 0.0

    def run(self, counted: list[dict[str, Any]], beside: list[dict[str, Any]]) -> None:
        """All at once, until those that count have ended."""
        over = threading.Event()
        with ThreadPoolExecutor(NUM_STREAMS) as pool:
            others = [pool.submit(self._read, fields, [], over) for fields in beside]
            begin = time.perf_counter()
            times: list[list[float]] = [[] for _ in counted]
            for reading in [pool.submit(self._read, *one, None) for one in zip(counted, times, strict=True)]:
                reading.result()
            self.seconds = time.perf_counter() - begin
            over.set()
            for other in others:
                other.result()
        self.num_tokens = sum(map(len, times))
        # The first tokens come with the prompts' steps.
        self.gaps = [later - sooner for one in times for sooner, later in pairwise(one[1:])]

    def _read(self, fields: dict[str, Any], times: list[float], over: threading.Event | None) -> None:
        body = {
            "max_tokens": NUM_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        url = self.server.url + "/v1/completions"
        with httpx.stream("POST", url, json=body | fields, timeout=600) as got:
            assert got.status_code == 200, got.read()
            for line in got.iter_lines():
                if over is not None and over.is_set():
                    return
                if line.startswith("data: {") and json.loads(line[6:])["choices"][0]["token_ids"]:
                    times.append(time.perf_counter())


def prompts(drawn: random.Random, **fields: Any) -> dict[str, Any]:
    return {"prompt": drawn.choices(range(1000, 40000), k=NUM_PROMPT)} | fields


def rates(server: Server, drawn: random.Random, num_rounds: int) -> Iterator[Row]:
    kinds: dict[str, dict[str, Any]] = {"free": {}, "under a JSON schema": {"guided_json": SCHEMA}}
    told: dict[str, list[float]] = {kind: [] for kind in kinds}
    for number in range(num_rounds + 1):
        for kind, fields in sorted(kinds.items(), reverse=number % 2 == 1):
            load = Load(server)
            load.run([prompts(drawn, **fields) for _ in range(NUM_STREAMS)], [])
            assert load.num_tokens == NUM_STREAMS * NUM_TOKENS, "an answer ended"
            if number:  # the first round warms up, and compiles
                told[kind].append(load.num_tokens / load.seconds)
    for kind, each in told.items():
        case = f"{NUM_STREAMS} streams {kind}"
        yield Row(case, "output_tokens_per_second", "tokens/s", round(statistics.median(each), 1))
    free, held = told.values()
    ratio = statistics.median(of_held / of_free for of_free, of_held in zip(free, held, strict=True))
    yield Row("constrained over free", "output_tokens_per_second", "ratio", round(ratio, 3), LEAST_RATE)


def gaps(server: Server, drawn: random.Random, num_rounds: int, width: int) -> Iterator[Row]:
    slow = {"guided_grammar": slow_grammar(width), "max_tokens": 1024}
    beside: dict[str, dict[str, Any]] = {"beside a free stream": {"max_tokens": 1024}, "beside a slow grammar": slow}
    told: dict[str, list[tuple[float, float]]] = {kind: [] for kind in beside}
    masks: list[float] = []
    for number in range(num_rounds + 1):
        for kind, fields in sorted(beside.items(), reverse=number % 2 == 1):
            before = read_metrics(server.url)
            load = Load(server)
            load.run([prompts(drawn) for _ in range(NUM_STREAMS - 1)], [prompts(drawn, **fields)])
            after = read_metrics(server.url)
            spent, num = (after[name] - before[name] for name in ("plait_mask_seconds_sum", "plait_mask_seconds_count"))
            if number:
                p99 = statistics.quantiles(load.gaps, n=100)[98]
                told[kind].append((p99, max(load.gaps)))
                masks += [spent / num] if num else []
    yield Row("slow grammar", "mask", "seconds", round(statistics.median(masks), 4))
    for place, metric, most in ((0, "itl_p99", MOST_P99), (1, "itl_max", MOST_LONGEST)):
        for kind, each in told.items():
            yield Row(kind, metric, "seconds", round(statistics.median(one[place] for one in each), 5))
        free, slow_one = told.values()
        ratio = statistics.median(late[place] / plain[place] for plain, late in zip(free, slow_one, strict=True))
        yield Row("beside a slow grammar over beside a free stream", metric, "ratio", round(ratio, 3), most)


def main() -> None:
    """Write the results file."""
    parser = argparse.ArgumentParser(description="Measure constrained answers and what a slow grammar costs others.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--width", type=int, default=32, help="of the slow grammar's words: the wider, the slower")
    asked = parser.parse_args()
    rows: list[Row] = []
    drawn = random.Random(7)
    with tempfile.TemporaryDirectory() as folder:
        server = start_server(Path(folder) / "server.log", None, *SERVER)
        try:
            rows += rates(server, drawn, asked.rounds)
            rows += gaps(server, drawn, asked.rounds, asked.width)
        finally:
            server.kill()
    report = {
        "commit": commit(),
        "command": "tests/bench/http/constrained.py",
        "machine": machine(),
        "versions": versions(),
        "rows": [msgspec.to_builtins(row) for row in rows],
    }
    asked.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    for row in rows:
        print(row.case, row.metric, row.value, row.unit)


if __name__ == "__main__":
    main()
