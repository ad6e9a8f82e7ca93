"""A real server under one to five times the load that it can carry, over HTTP on a CPU.

    python tests/bench/http/overload.py --out tests/bench/results/overload.json

Finds what the server completes with as many clients as it has slots. Then requests arrive at fixed times, at one to
five times that rate, whatever the server answers. Goodput counts the tokens of complete answers. Retry-After is
compared with what the requests that were accepted just before and after a rejected one really waited.
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
from dataclasses import dataclass
from pathlib import Path

import httpx
import msgspec
from plait.bench.result_file import Row, commit, machine, versions

sys.path.insert(0, str(Path(__file__).parents[2]))

from plait_testing.running_server import start_server

MODELS = Path(__file__).parents[2] / "models"
MODEL = "recall-gqa"
NUM_SLOTS, MAX_QUEUE = 8, 32
SERVER = ("--max-seqs", str(NUM_SLOTS), "--max-queue", str(MAX_QUEUE), "--threads", "1", "--no-prefix-cache")
INPUT_LEN, OUTPUT_LEN = 512, 64
FACTORS = (1.0, 2.0, 3.0, 4.0, 5.0)
WITHIN = 2.0
"""A Retry-After is true if it is off by at most this factor, or by a second, which it is rounded to."""
TIMEOUT = 300.0


@dataclass(slots=True)
class Seen:
    """What a client saw of one request, in seconds since the load began."""

    sent: float
    status: int = 0
    first: float = 0.0
    ended: float = 0.0
    num_tokens: int = 0
    retry_after: float | None = None

    @property
    def is_whole(self) -> bool:
        return self.status == 200 and self.num_tokens == OUTPUT_LEN

    @property
    def ttft(self) -> float:
        return self.first - self.sent


class Load:
    """Requests to one server."""

    def __init__(self, url: str) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        self._client = httpx.AsyncClient(base_url=url, timeout=TIMEOUT, limits=limits)
        self._begin = time.monotonic()
        self._drawn = random.Random(0)

    def now(self) -> float:
        return time.monotonic() - self._begin

    async def close(self) -> None:
        await self._client.aclose()

    async def ask(self) -> Seen:
        """One streamed request with a prompt of random ids."""
        seen = Seen(self.now())
        prompt = [self._drawn.randrange(10, 200) for _ in range(INPUT_LEN)]
        body = {"model": MODEL, "prompt": prompt, "max_tokens": OUTPUT_LEN, "ignore_eos": True, "stream": True}
        body["stream_options"] = {"include_usage": True}
        async with self._client.stream("POST", "/v1/completions", json=body) as response:
            seen.status = response.status_code
            if "retry-after" in response.headers:
                seen.retry_after = float(response.headers["retry-after"])
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    seen.first = seen.first or self.now()
                    usage = json.loads(line[6:]).get("usage")
                    seen.num_tokens = usage["completion_tokens"] if usage else seen.num_tokens
        seen.ended = self.now()
        return seen

    async def closed(self, seconds: float, num_clients: int) -> list[Seen]:
        """Clients that ask again as soon as they are answered."""

        async def one() -> list[Seen]:
            found = []
            while self.now() < seconds:
                found.append(await self.ask())
            return found

        self._begin = time.monotonic()
        return [seen for each in await asyncio.gather(*(one() for _ in range(num_clients))) for seen in each]

    async def open(self, rate: float, seconds: float) -> list[Seen]:
        """Requests at a fixed rate, whatever becomes of those before."""
        self._begin = time.monotonic()
        tasks = []
        for number in range(round(rate * seconds)):
            await asyncio.sleep(max(0.0, number / rate - self.now()))
            tasks.append(asyncio.create_task(self.ask()))
        return await asyncio.gather(*tasks)


def goodput(seen: list[Seen], begin: float, end: float) -> float:
    """Tokens a second of answers that came whole, each answer's tokens spread evenly over its time."""
    total = 0.0
    for each in (it for it in seen if it.is_whole):
        overlap = max(0.0, min(each.ended, end) - max(each.first, begin))
        total += each.num_tokens * overlap / max(each.ended - each.first, 1e-6)
    return total / (end - begin)


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def truths(seen: list[Seen]) -> list[bool]:
    """Of each rejected request with a Retry-After, whether the wait of those accepted beside it is near."""
    accepted = sorted((it.sent, it.ttft) for it in seen if it.is_whole)
    found = []
    for each in (it for it in seen if it.status == 429 and it.retry_after is not None):
        assert each.retry_after is not None
        waits = [ttft for sent, ttft in accepted if abs(sent - each.sent) < 1.0]
        if waits:
            wait = statistics.median(waits)
            near = wait / WITHIN <= each.retry_after <= wait * WITHIN
            found.append(near or abs(each.retry_after - wait) <= 1.0)
    return found


def rows(case: str, seen: list[Seen], seconds: float) -> Iterator[Row]:
    """The first third of the time fills the queue and does not count."""
    begin = seconds / 3
    counted = [it for it in seen if it.sent >= begin]
    whole = [it for it in counted if it.is_whole]
    rejected = [it for it in counted if it.status == 429]
    hints = [it.retry_after for it in rejected if it.retry_after is not None]
    near = truths(counted)
    yield Row(case, "goodput", "tokens/s", goodput(seen, begin, seconds))
    for name, share in (("p50", 0.5), ("p99", 0.99)):
        yield Row(case, f"accepted_ttft_{name}", "seconds", percentile([it.ttft for it in whole], share))
    yield Row(case, "share_accepted", "1", len(whole) / len(counted))
    yield Row(case, "num_neither_whole_nor_429", "requests", len(counted) - len(whole) - len(rejected), 0)
    yield Row(case, "num_429_without_retry_after", "requests", len(rejected) - len(hints), 0)
    if hints:
        yield Row(case, "retry_after_p50", "seconds", percentile(hints, 0.5))
        yield Row(case, "retry_after_max", "seconds", max(hints))
    if near:
        yield Row(case, "share_of_true_retry_after", "1", sum(near) / len(near))


def shown(row: Row) -> Row:
    print(f"{row.case:>12} {row.metric:30} {row.value:10.3f} {row.unit}", flush=True)
    return msgspec.structs.replace(row, value=float(f"{row.value:.5g}"))


async def measured(url: str, seconds: float) -> list[Row]:
    load = Load(url)
    await load.closed(2.0, NUM_SLOTS)
    seen = await load.closed(seconds, NUM_SLOTS)
    peak = goodput(seen, seconds / 3, seconds)
    found = [shown(Row("closed loop", "goodput", "tokens/s", peak))]
    for factor in FACTORS:
        seen = await load.open(factor * peak / OUTPUT_LEN, seconds)
        found += [shown(row) for row in rows(f"{factor:g}x", seen, seconds)]
    await load.close()
    return found


def main() -> None:
    """Write the results file."""
    parser = argparse.ArgumentParser(description="Offer a server more than it can carry.")
    parser.add_argument("--seconds", type=float, default=30.0, help="of each load")
    parser.add_argument("--out", type=Path, required=True)
    typed = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        server = start_server(Path(folder) / "server.log", MODELS / MODEL, *SERVER)
        try:
            found = asyncio.run(measured(server.url, typed.seconds))
            health = httpx.get(f"{server.url}/health").status_code
        finally:
            server.kill()
    found.append(shown(Row("afterwards", "health", "status", health, 200)))
    report = {
        "commit": commit(),
        "command": f"tests/bench/http/overload.py --seconds {typed.seconds:g}",
        "machine": machine(),
        "versions": versions(),
        "rows": [msgspec.to_builtins(row) for row in found],
    }
    typed.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
