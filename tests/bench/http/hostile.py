"""10,000 hostile requests beside an accepted load: what the server's memory does, and how long accepted requests take.

    python tests/bench/http/hostile.py --out tests/bench/results/hostile.json --note "what else ran"

The kinds are those of `plait_testing/hostile.py`, each as often. Clients of short chats ask all the while, and before
that alone for a while. Memory is the resident memory of the server's own process at rest, when it has given its heap
back: after the load alone, after the first eighth of the hostile requests, and at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import msgspec
import psutil
from plait.bench.result_file import Row, commit, machine, versions
from plait.http import heap_trim

sys.path.insert(0, str(Path(__file__).parents[2]))

from plait_testing.hostile import ATTACKS, Answered, attack_with_all, wrongly_answered
from plait_testing.running_server import Server, start_server

MODEL = Path(__file__).parents[2] / "models" / "recall-gqa"
SERVER = ("--max-seqs", "8", "--max-model-len", "1024", "--threads", "1")
NUM_CLIENTS = 2
CHAT = {"messages": [{"role": "user", "content": "copy kilo"}], "max_tokens": 16, "temperature": 0}
GOAL_GROWTH = 0.05


async def ask(url: str, seconds: list[float], until: asyncio.Event) -> None:
    """A client that asks again as soon as it is answered."""
    async with httpx.AsyncClient(base_url=url, timeout=300) as client:
        while not until.is_set():
            begin = time.perf_counter()
            answer = await client.post("/v1/chat/completions", json=CHAT)
            answer.raise_for_status()
            seconds.append(time.perf_counter() - begin)


async def alone(url: str, length: float) -> list[float]:
    """Seconds of each accepted request without hostile ones."""
    seconds: list[float] = []
    over = asyncio.Event()
    asking = [asyncio.create_task(ask(url, seconds, over)) for _ in range(NUM_CLIENTS)]
    await asyncio.sleep(length)
    over.set()
    await asyncio.gather(*asking)
    return seconds


async def beside(url: str, number: int, at_a_time: int) -> tuple[list[float], list[Answered]]:
    """The same beside hostile requests."""
    seconds: list[float] = []
    over = asyncio.Event()
    asking = [asyncio.create_task(ask(url, seconds, over)) for _ in range(NUM_CLIENTS)]
    try:
        answers = await attack_with_all(httpx.URL(url).port or 80, number, at_a_time)
    finally:
        over.set()
        await asyncio.gather(*asking)
    return seconds, answers


def p99(seconds: list[float]) -> float:
    return statistics.quantiles(seconds, n=100)[98]


def memory_at_rest(process: psutil.Process) -> int:
    """Bytes; the body that a trim was for may have been followed by others, which another trim is for."""
    time.sleep(2 * heap_trim.SECONDS + 1)
    num_bytes: int = process.memory_info().rss
    return num_bytes


def measure(server: Server, number: int, at_a_time: int, seconds_alone: float) -> Iterator[Row]:
    process = psutil.Process(server.process.pid)
    first = asyncio.run(alone(server.url, seconds_alone))
    before = memory_at_rest(process)
    asyncio.run(beside(server.url, number // 8, at_a_time))
    warm = memory_at_rest(process)
    times, answers = asyncio.run(beside(server.url, number, at_a_time))
    after = memory_at_rest(process)
    last = asyncio.run(alone(server.url, seconds_alone))
    print(Counter((each.kind, each.status) for each in answers))
    yield Row("hostile", "requests", "1", len(answers), 10_000)
    yield Row("hostile", "answered_wrongly", "1", len(list(wrongly_answered(answers))), 0)
    yield Row("hostile", "memory_before", "bytes", before, None)
    yield Row("hostile", "memory_warm", "bytes", warm, None)
    yield Row("hostile", "memory_growth", "1", after / warm - 1, GOAL_GROWTH)
    yield Row("hostile", "memory_growth_from_load_alone", "1", after / before - 1, GOAL_GROWTH)
    for case, found in (("accepted, alone", first + last), ("accepted, beside", times)):
        yield Row(case, "requests", "1", len(found), None)
        yield Row(case, "e2e_p50", "s", statistics.median(found), None)
        yield Row(case, "e2e_p99", "s", p99(found), None)
    yield Row("accepted, beside", "e2e_p99_over_alone", "1", p99(times) / p99(first + last), 1.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--at-a-time", type=int, default=8 * len(ATTACKS))
    parser.add_argument("--seconds-alone", type=float, default=30.0, help="before, and once more afterwards")
    parser.add_argument("--note")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        server = start_server(Path(folder) / "server.log", MODEL, *SERVER)
        try:
            rows = list(measure(server, args.requests, args.at_a_time, args.seconds_alone))
        finally:
            with suppress(OSError):
                server.kill()
    document = {
        "commit": commit(),
        "command": " ".join(["tests/bench/http/hostile.py", "--requests", str(args.requests)]),
        "machine": machine(),
        "versions": versions(("plait", "uvloop", "httptools", "msgspec")),
        **({"note": args.note} if args.note else {}),
        "rows": [msgspec.to_builtins(row) for row in rows],
    }
    text = json.dumps(document, indent=1) + "\n"
    print(text)
    if args.out:
        args.out.write_text(text)


if __name__ == "__main__":
    main()
