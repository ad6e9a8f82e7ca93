"""A real server under one to five times the load that it can carry, over HTTP on a CPU.

    python tests/bench/http/overload.py --out tests/bench/results/overload.json \\
        --before COMMIT=FOLDER --before-out tests/bench/results/overload-before.json

With as many clients as the server has slots, it completes what it can: the peak. Then requests arrive at fixed times,
at one to five times that rate, whatever the server answers. Goodput counts the tokens of complete answers. Each load
has a peak measured just before it, and the two versions take turns, so that both have the same neighbours on the
machine. Figures are medians over the rounds; times are over all of them.
Retry-After is compared with what the requests that were accepted just before and after a rejected one really waited.

FOLDER is a source tree of another version, built; both start from this program's Python.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import msgspec
import psutil
from plait.bench.result_file import Row, commit, machine, versions

sys.path.insert(0, str(Path(__file__).parents[2]))

from plait_testing.metrics import read_metrics
from plait_testing.running_server import Server, start_server

MODELS = Path(__file__).parents[2] / "models"
MODEL = "recall-gqa"
NUM_SLOTS, MAX_QUEUE = 8, 32
SERVER = ("--max-seqs", str(NUM_SLOTS), "--max-queue", str(MAX_QUEUE), "--threads", "1", "--no-prefix-cache")
INPUT_LEN, OUTPUT_LEN = 512, 64
FACTORS = (1.0, 2.0, 3.0, 5.0)
NUM_ROUNDS = 3
WITHIN = 2.0
"""A Retry-After is true if it is off by at most this factor, or by a second, which it is rounded to."""
TIMEOUT = 300.0
WORST, GOAL = "5x", 0.9
"""Goodput over the peak that the greatest load should keep."""


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


@dataclass(frozen=True, slots=True)
class Work:
    """What passed while a load ran to its end, in seconds."""

    elapsed: float
    busy: float
    """CPU time of the whole machine."""
    ours: float
    """CPU time of the server and this program."""
    worker: float
    """CPU time of the worker, which computes with one thread."""
    steps: float
    """The worker's steps, by its own clock."""

    def __sub__(self, begin: Work) -> Work:
        return Work(
            self.elapsed - begin.elapsed,
            self.busy - begin.busy,
            self.ours - begin.ours,
            self.worker - begin.worker,
            self.steps - begin.steps,
        )


@dataclass(frozen=True, slots=True)
class Part:
    """A load, and what the machine did for it."""

    seen: list[Seen]
    seconds: float
    work: Work

    @property
    def begin(self) -> float:
        """The time before fills the queue and does not count."""
        return self.seconds / 3

    @property
    def counted(self) -> list[Seen]:
        return [it for it in self.seen if it.sent >= self.begin]

    @property
    def goodput(self) -> float:
        return goodput(self.seen, self.begin, self.seconds)

    @property
    def tokens_a_worker_second(self) -> float:
        """Tokens of complete answers over the worker's CPU time. Neighbours on the machine change it little."""
        return sum(it.num_tokens for it in self.seen if it.is_whole) / self.work.worker


def median(of: Iterable[float]) -> float:
    return statistics.median(list(of))


def rows(case: str, parts: list[Part], peaks: list[Part]) -> Iterator[Row]:
    goal = GOAL if case == WORST else None
    served = median(it.goodput for it in parts)
    by_cpu = median(it.tokens_a_worker_second for it in parts)
    yield Row(case, "goodput", "tokens/s", served)
    if parts is not peaks:
        yield Row(case, "goodput_over_peak", "1", served / median(it.goodput for it in peaks), goal)
        ratio = by_cpu / median(it.tokens_a_worker_second for it in peaks)
        yield Row(case, "goodput_over_peak_by_worker_cpu", "1", ratio, goal)
    yield Row(case, "worker_busy_share", "1", median(it.work.steps / it.work.elapsed for it in parts))
    yield Row(case, "cpu_share_of_others", "1", median(1 - it.work.ours / it.work.busy for it in parts))
    yield from answer_rows(case, [seen for each in parts for seen in each.counted])
    near = [it for each in parts for it in truths(each.counted)]
    if near:
        yield Row(case, "share_of_true_retry_after", "1", sum(near) / len(near))


def answer_rows(case: str, counted: list[Seen]) -> Iterator[Row]:
    whole = [it for it in counted if it.is_whole]
    rejected = [it for it in counted if it.status == 429]
    hints = [it.retry_after for it in rejected if it.retry_after is not None]
    for name, share in (("p50", 0.5), ("p99", 0.99)):
        yield Row(case, f"accepted_ttft_{name}", "seconds", percentile([it.ttft for it in whole], share))
    yield Row(case, "share_accepted", "1", len(whole) / len(counted))
    yield Row(case, "num_neither_whole_nor_429", "requests", len(counted) - len(whole) - len(rejected), 0)
    yield Row(case, "num_429_without_retry_after", "requests", len(rejected) - len(hints), 0)
    if hints:
        yield Row(case, "retry_after_p50", "seconds", percentile(hints, 0.5))
        yield Row(case, "retry_after_max", "seconds", max(hints))


@dataclass(slots=True)
class Side:
    """One version of the server."""

    commit: str | None
    out: Path
    server: Server
    load: Load
    seconds: float
    peaks: list[Part] = field(default_factory=list)
    parts: dict[float, list[Part]] = field(default_factory=lambda: {factor: [] for factor in FACTORS})
    rows: list[Row] = field(default_factory=list)

    def add(self, row: Row) -> None:
        print(f"{self.out.stem:>16} {row.case:>12} {row.metric:30} {row.value:10.3f} {row.unit}", flush=True)
        self.rows.append(msgspec.structs.replace(row, value=float(f"{row.value:.5g}")))

    def work(self) -> Work:
        """Since the start of each process."""
        workers = {each.pid: cpu_seconds(each) for each in self.server.workers()}
        samples = read_metrics(self.server.url).items()
        server = cpu_seconds(psutil.Process(self.server.process.pid)) + sum(workers.values())
        return Work(
            elapsed=time.monotonic(),
            busy=busy_seconds(),
            ours=server + cpu_seconds(psutil.Process()),
            worker=max(workers.values()),
            steps=sum(value for name, value in samples if name.startswith("plait_step_seconds_sum")),
        )

    async def measure(self, factor: float) -> None:
        """The peak, then `factor` times as many requests."""
        begin = self.work()
        seen = await self.load.closed(self.seconds / 2, NUM_SLOTS)
        self.peaks.append(peak := Part(seen, self.seconds / 2, self.work() - begin))
        begin = self.work()
        seen = await self.load.open(factor * peak.goodput / OUTPUT_LEN, self.seconds)
        self.parts[factor].append(Part(seen, self.seconds, self.work() - begin))

    def finish(self) -> None:
        """Makes the rows, once all is measured."""
        for name, parts in (("peak", self.peaks), *((f"{factor:g}x", it) for factor, it in self.parts.items())):
            for row in rows(name, parts, self.peaks):
                self.add(row)
        self.add(Row("afterwards", "health", "status", httpx.get(f"{self.server.url}/health").status_code, 200))

    def close(self) -> None:
        """Ends the server and writes the results file."""
        self.server.kill()
        report = {
            "commit": self.commit,
            "command": f"tests/bench/http/overload.py --seconds {self.seconds:g}",
            "machine": machine(),
            "versions": versions(),
            "rows": [msgspec.to_builtins(row) for row in self.rows],
        }
        self.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def busy_seconds() -> float:
    """CPU time of the whole machine so far, without what was idle."""
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system + times.irq + times.softirq)


async def measured(sides: list[Side]) -> None:
    for side in sides:
        await side.load.closed(2.0, NUM_SLOTS)
    for factor in FACTORS * NUM_ROUNDS:
        for side in sides:
            await side.measure(factor)
    for side in sides:
        side.finish()
    for side in sides:
        await side.load.close()


def started(folder: Path | None, commit_of: str | None, out: Path, log: Path, seconds: float) -> Side:
    """A server of this version, or of the one in `folder`."""
    path = os.environ.get("PYTHONPATH", "")
    if folder is not None:
        rooms = ("router/python", "worker", "kernels", "proto")
        os.environ["PYTHONPATH"] = os.pathsep.join(str(folder / room) for room in rooms)
    server = start_server(log, MODELS / MODEL, *SERVER)
    os.environ["PYTHONPATH"] = path
    if not server.url:
        raise SystemExit(f"overload: the server did not start: {server.errors}")
    return Side(commit_of, out, server, Load(server.url), seconds)


def main() -> None:
    """Write the results files."""
    parser = argparse.ArgumentParser(description="Offer a server more than it can carry.")
    parser.add_argument("--seconds", type=float, default=12.0, help="of each load")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--before", metavar="COMMIT=FOLDER", help="another version, and its built source tree")
    parser.add_argument("--before-out", type=Path, help="results file of the other version")
    typed = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder) / f"{name}.log" for name in ("after", "before")]
        sides = [started(None, commit(), typed.out, logs[0], typed.seconds)]
        if typed.before is not None:
            before, _, tree = typed.before.partition("=")
            sides.insert(0, started(Path(tree), before, typed.before_out, logs[1], typed.seconds))
        try:
            asyncio.run(measured(sides))
        finally:
            for side in sides:
                side.close()


if __name__ == "__main__":
    main()
