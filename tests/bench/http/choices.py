"""When the last of several choices has its first token, against a request with one choice, on a CPU.

    python tests/bench/http/choices.py --out tests/bench/results/choices.json

The demo model gets prompts of 2,048 tokens that nobody asked before, with 1 and with 8 choices in turn, with the prefix
cache and without. A greedy stream of one token a choice is read; the time of the last choice's token is taken. Figures
are medians over the rounds and, for the ratio, medians of the rounds' ratios. Tokens computed are the server's count.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
from plait.bench.result_file import Row, commit, machine, versions

sys.path.insert(0, str(Path(__file__).parents[2]))

from plait_testing.metrics import read_metrics
from plait_testing.running_server import Server, start_server

NUM_PROMPT = 2048
NUM_CHOICES = 8
NUM_ROUNDS = 7
MOST = 1.3
"""Time of the last choice's first token over that of a request with one choice."""
PAGE_SIZE = 16
SERVER = ("--max-batch-tokens", "2048", "--page-size", str(PAGE_SIZE), "--max-model-len", "4096")
CACHES = {"on": "--prefix-cache", "off": "--no-prefix-cache"}
COMPUTED = 'plait_step_tokens_total{phase="prefill"}'


def last_first_token(server: Server, prompt: list[int], n: int) -> float:
    """Seconds from the request to the first token of the last choice that gets one."""
    body = {"prompt": prompt, "n": n, "max_tokens": 1, "temperature": 0, "ignore_eos": True, "stream": True}
    left, begin = set(range(n)), time.perf_counter()
    with httpx.stream(
        "POST", server.url + "/v1/completions", json=body | {"return_token_ids": True}, timeout=600
    ) as got:
        for line in got.iter_lines():
            if not left:
                break
            for choice in json.loads(line.removeprefix("data: "))["choices"] if line else ():
                left -= {choice["index"]} if choice["token_ids"] else set()
    assert not left
    return time.perf_counter() - begin


def computed(server: Server) -> float:
    return read_metrics(server.url)[COMPUTED]


def measured(server: Server, cache: str) -> Iterator[Row]:
    """Rows of one server."""
    drawn = random.Random(7)
    times: dict[int, list[float]] = {1: [], NUM_CHOICES: []}
    tokens: dict[int, float] = {}
    last_first_token(server, drawn.choices(range(1000, 40000), k=NUM_PROMPT), NUM_CHOICES)
    for _ in range(NUM_ROUNDS):
        for n in times:
            before = computed(server)
            times[n].append(last_first_token(server, drawn.choices(range(1000, 40000), k=NUM_PROMPT), n))
            tokens[n] = computed(server) - before
    ratio = statistics.median(many / one for one, many in zip(times[1], times[NUM_CHOICES], strict=True))
    for n, seconds in times.items():
        case = f"prompt of {NUM_PROMPT} tokens, n {n}, prefix cache {cache}"
        most = NUM_PROMPT + n * PAGE_SIZE
        yield Row(case, "last_choices_first_token", "seconds", round(statistics.median(seconds), 4))
        yield Row(case, "tokens_computed", "tokens", tokens[n], most)
    yield Row(
        f"n {NUM_CHOICES} over n 1, prefix cache {cache}", "last_choices_first_token", "ratio", round(ratio, 3), MOST
    )


def main() -> None:
    """Write the results file."""
    parser = argparse.ArgumentParser(description="Time the first token of the last choice.")
    parser.add_argument("--out", type=Path, required=True)
    out: Path = parser.parse_args().out
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for cache, flag in CACHES.items():
            server = start_server(Path(folder) / f"{cache}.log", None, *SERVER, flag)
            try:
                rows += measured(server, cache)
            finally:
                server.kill()
    report = {
        "commit": commit(),
        "command": "tests/bench/http/choices.py",
        "machine": machine(),
        "versions": versions(),
        "rows": [msgspec.to_builtins(row) for row in rows],
    }
    out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    for row in rows:
        print(row.case, row.metric, row.value, row.unit)


if __name__ == "__main__":
    main()
