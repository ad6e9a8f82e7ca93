"""Whether a key at its bound slows the others: a steady load of one key, beside one that asks as fast as it can.

    python tests/bench/http/quotas.py --out tests/bench/results/quotas.json --note "what else ran"

The other key may begin one request a minute and hammers: what it asks gets a 429. Parts with the hammer and
without it take turns, so that both have the same neighbours on the machine. Latencies count from the intended arrival.
The figure is the median over the rounds of one p99 over the other. What this program itself computes for the hammer
counts as the server's fault.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import msgspec
from plait.bench.result_file import Row

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.faults.fault_rows import write_record
from plait_testing.running_server import start_server

MODEL = Path(__file__).parents[2] / "models" / "recall-gqa"
SERVER = ("--max-seqs=8", "--max-model-len=1024", "--threads=1")
KEYS = "steady\nhammer requests_per_minute=1\n"
CHAT = {"messages": [{"role": "user", "content": "copy kilo"}], "max_tokens": 16, "temperature": 0}
GOAL = 1.05
HAMMERS = 4


@dataclass
class Part:
    """What was seen while one load ran."""

    seconds: list[float] = field(default_factory=list)
    """Of each request of the steady key."""
    refused: int = 0
    taken: int = 0


async def steady(client: httpx.AsyncClient, part: Part, rate: float, length: float) -> None:
    """Requests at fixed times, whatever becomes of those before."""
    begin = time.perf_counter()

    async def ask(due: float) -> None:
        answer = await client.post("/v1/chat/completions", json=CHAT, headers=bearer("steady"))
        answer.raise_for_status()
        part.seconds.append(time.perf_counter() - due)

    async with asyncio.TaskGroup() as asking:
        for number in range(round(rate * length)):
            due = begin + number / rate
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            asking.create_task(ask(due))


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def hammer(client: httpx.AsyncClient, part: Part, pause: float) -> None:
    """Asks again once it is answered and has waited for `pause`, until cancelled."""
    while True:
        answer = await client.post("/v1/chat/completions", json=CHAT, headers=bearer("hammer"))
        part.refused += answer.status_code == 429
        part.taken += answer.status_code == 200
        await asyncio.sleep(pause)


async def load(url: str, rate: float, length: float, pause: float | None) -> Part:
    """A part with the hammer, or without it where there is no pause."""
    part = Part()
    async with httpx.AsyncClient(base_url=url, timeout=300) as client, httpx.AsyncClient(base_url=url) as other:
        beside = [asyncio.create_task(hammer(other, part, pause)) for _ in range(HAMMERS)] if pause is not None else []
        try:
            await steady(client, part, rate, length)
        finally:
            for task in beside:
                task.cancel()
            await asyncio.gather(*beside, return_exceptions=True)
    return part


def p99(seconds: list[float]) -> float:
    return statistics.quantiles(seconds, n=100)[98]


def rows(alone: list[Part], beside: list[Part], length: float) -> Iterator[Row]:
    for case, parts in (("alone", alone), ("beside a key at its bound", beside)):
        seconds = [each for part in parts for each in part.seconds]
        yield Row(case, "requests", "1", len(seconds))
        yield Row(case, "e2e_p50", "s", statistics.median(seconds))
        yield Row(case, "e2e_p99", "s", p99(seconds))
    yield Row("the key at its bound", "refused", "1/s", sum(part.refused for part in beside) / length / len(beside))
    yield Row("the key at its bound", "taken", "1/s", sum(part.taken for part in beside) / length / len(beside))
    ratios = [p99(with_it.seconds) / p99(without.seconds) for without, with_it in zip(alone, beside, strict=True)]
    yield Row("beside a key at its bound", "e2e_p99_over_alone", "1", statistics.median(ratios), GOAL)
    yield Row("beside a key at its bound", "e2e_p99_over_alone_least", "1", min(ratios))
    yield Row("beside a key at its bound", "e2e_p99_over_alone_most", "1", max(ratios))


def measured(args: argparse.Namespace) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder, "keys")
        keys.write_text(KEYS)
        keys.chmod(0o600)
        server = start_server(Path(folder, "server.log"), MODEL, *SERVER, f"--api-key-file={keys}")
        try:
            if not server.url:
                raise SystemExit(server.errors)
            asyncio.run(load(server.url, args.rate, 5.0, args.pause))  # warms both
            alone, beside = list[Part](), list[Part]()
            for _ in range(args.rounds):
                alone.append(asyncio.run(load(server.url, args.rate, args.seconds, None)))
                beside.append(asyncio.run(load(server.url, args.rate, args.seconds, args.pause)))
        finally:
            server.kill()
    return list(rows(alone, beside, args.seconds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=30.0, help="of each part")
    parser.add_argument("--rate", type=float, default=8.0, help="requests a second of the steady key")
    parser.add_argument("--pause", type=float, default=0.05, help="seconds between two requests of each hammer")
    parser.add_argument("--note")
    args = parser.parse_args()
    rows = msgspec.to_builtins(measured(args))
    print(json.dumps(rows, indent=1))
    flags = f"--rounds {args.rounds} --seconds {args.seconds} --rate {args.rate} --pause {args.pause}"
    command = f"tests/bench/http/quotas.py {flags}"
    write_record(args.out, rows, command=command, **({"note": args.note} if args.note else {}))


if __name__ == "__main__":
    main()
