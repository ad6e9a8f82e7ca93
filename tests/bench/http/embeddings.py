"""Embeddings beside generation: what each gets alone, and what both get together.

    python tests/bench/http/embeddings.py --out tests/bench/results/embeddings.json --note "what else ran"

Clients of each kind ask again as soon as they are answered. The three loads take turns, so that all have the same
neighbours on the machine; figures are medians over the rounds. The two shares of what each gets alone add up to 1 if
neither costs the other more than its time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec
from plait.bench.result_file import Row

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.faults.fault_rows import write_record
from plait_testing.running_server import start_server

MODEL = Path(__file__).parents[2] / "models" / "recall-gqa"
SERVER = ("--max-seqs=8", "--max-model-len=1024", "--threads=1", "--no-prefix-cache")
INPUT_LEN, OUTPUT_LEN = 128, 32
NUM_CLIENTS = 4
"""Of each kind."""
GOAL = 1.0
LOADS = {"embeddings alone": (True, False), "generation alone": (False, True), "both": (True, True)}


@dataclass
class Part:
    """What was done while one load ran; times are latencies."""

    length: float
    embedded: list[float] = field(default_factory=list)
    answered: list[float] = field(default_factory=list)

    @property
    def embedding_rate(self) -> float:
        """Inputs a second."""
        return len(self.embedded) / self.length

    @property
    def token_rate(self) -> float:
        """Output tokens a second."""
        return len(self.answered) * OUTPUT_LEN / self.length


def prompt() -> list[int]:
    return [random.randrange(97, 122) for _ in range(INPUT_LEN)]


def embedding() -> tuple[str, dict[str, Any]]:
    return "/v1/embeddings", {"input": prompt()}


def completion() -> tuple[str, dict[str, Any]]:
    return "/v1/completions", {"prompt": prompt(), "max_tokens": OUTPUT_LEN, "ignore_eos": True, "temperature": 0}


async def load(url: str, length: float, embeds: bool, generates: bool) -> Part:
    part = Part(length)
    until = time.perf_counter() + length

    async def ask(client: httpx.AsyncClient, asked: Any, seconds: list[float]) -> None:
        while (begin := time.perf_counter()) < until:
            path, body = asked()
            (await client.post(path, json=body)).raise_for_status()
            if (end := time.perf_counter()) <= until:
                seconds.append(end - begin)

    kinds = [(embedding, part.embedded)] * embeds + [(completion, part.answered)] * generates
    async with httpx.AsyncClient(base_url=url, timeout=300) as client:
        await asyncio.gather(*(ask(client, *kind) for kind in kinds for _ in range(NUM_CLIENTS)))
    return part


def rows(parts: dict[str, list[Part]]) -> Iterator[Row]:
    for name, (embeds, generates) in LOADS.items():
        found = parts[name]
        if embeds:
            yield Row(name, "embeddings_per_second", "1/s", statistics.median(part.embedding_rate for part in found))
            yield Row(name, "embedding_p50", "s", statistics.median(each for part in found for each in part.embedded))
        if generates:
            yield Row(name, "output_tokens_per_second", "1/s", statistics.median(part.token_rate for part in found))
            yield Row(name, "answer_p50", "s", statistics.median(each for part in found for each in part.answered))
    embedded, answered = list(shares(parts, "embeddings alone")), list(shares(parts, "generation alone"))
    yield Row("both", "share_of_embeddings_alone", "1", statistics.median(embedded))
    yield Row("both", "share_of_generation_alone", "1", statistics.median(answered))
    together = [one + other for one, other in zip(embedded, answered, strict=True)]
    yield Row("both", "shares_together", "1", statistics.median(together), GOAL)
    yield Row("both", "shares_together_least", "1", min(together))
    yield Row("both", "shares_together_most", "1", max(together))


def shares(parts: dict[str, list[Part]], alone: str) -> Iterator[float]:
    """Of each round: the rate beside the other load over the rate alone."""
    for one, both in zip(parts[alone], parts["both"], strict=True):
        if alone == "embeddings alone":
            yield both.embedding_rate / one.embedding_rate
        else:
            yield both.token_rate / one.token_rate


def measured(args: argparse.Namespace) -> list[Row]:
    parts: dict[str, list[Part]] = {name: [] for name in LOADS}
    with tempfile.TemporaryDirectory() as folder:
        server = start_server(Path(folder, "server.log"), MODEL, *SERVER)
        try:
            if not server.url:
                raise SystemExit(server.errors)
            asyncio.run(load(server.url, 5.0, True, True))  # warms both
            for _ in range(args.rounds):
                for name, kinds in LOADS.items():
                    parts[name].append(asyncio.run(load(server.url, args.seconds, *kinds)))
        finally:
            server.kill()
    return list(rows(parts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each load")
    parser.add_argument("--note")
    args = parser.parse_args()
    rows = msgspec.to_builtins(measured(args))
    print(json.dumps(rows, indent=1))
    command = f"tests/bench/http/embeddings.py --rounds {args.rounds} --seconds {args.seconds}"
    write_record(args.out, rows, command=command, **({"note": args.note} if args.note else {}))


if __name__ == "__main__":
    main()
