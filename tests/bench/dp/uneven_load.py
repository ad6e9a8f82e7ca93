"""Engines whose replicas share their experts, under uneven load with prompts in most steps: no stall, no other token.

    python tests/bench/dp/uneven_load.py --seconds 600 --engines 2 --dp 1 --tcp --out FILE

First one replica alone answers every question. Then the group does, over and over: the first engine gets all streams
but one, in bursts, the last engine one stream with pauses, so that replicas idle, prefill and decode in all
combinations. Each answer must have the tokens that one replica gave.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import msgspec
from plait.bench.result_file import Row, commit, machine, versions

sys.path.insert(0, str(Path(__file__).parents[2]))

from plait_testing import recall
from plait_testing.grouped_engines import over_tcp, spawn_engines
from plait_testing.metrics import read_metrics
from plait_testing.running_server import Server, start_server, wait_until_ready

MODEL = Path(__file__).parents[2] / "models" / "recall-mla"
FLAGS = (
    *("--dtype", "float32", "--max-batch-tokens", "256", "--long-prefill-token-threshold", "32"),
    *("--threads", "1", "--no-prefix-cache"),
)
"""Short chunks, and no page found again: most steps have prompts."""
CONTEXTS = (256, 512, 1024)
STALL_SECONDS = 60.0
"""Without a token of any stream."""


@dataclass
class Seen:
    """What the clients have seen; shared by their threads."""

    expected: dict[int, list[int]]
    num_right: int = 0
    wrong: list[str] = field(default_factory=list)
    last_token: float = field(default_factory=time.monotonic)
    longest_gap: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def token(self) -> None:
        """A stream got some."""
        with self.lock:
            now = time.monotonic()
            self.longest_gap = max(self.longest_gap, now - self.last_token)
            self.last_token = now

    def answer(self, number: int, ids: list[int]) -> None:
        """A stream is at its end."""
        with self.lock:
            if ids == self.expected[number]:
                self.num_right += 1
            else:
                self.wrong.append(f"question {number}: {ids}, expected {self.expected[number]}")


def body(problem: recall.Problem) -> dict[str, object]:
    return {
        "messages": problem["messages"],
        "temperature": 0,
        "max_tokens": 48,
        "stream": True,
        "return_token_ids": True,
    }


def ask(client: httpx.Client, problem: recall.Problem, seen: Seen | None) -> list[int]:
    """The ids of the answer's tokens."""
    ids: list[int] = []
    with client.stream("POST", "/v1/chat/completions", json=body(problem)) as got:
        got.raise_for_status()
        for line in got.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = msgspec.json.decode(line.removeprefix("data: "))
            if "error" in event:
                raise RuntimeError(event["error"]["message"])
            for choice in event.get("choices", ()):
                ids += choice.get("token_ids") or ()
            if seen is not None:
                seen.token()
    return ids


def keep_asking(
    url: str, asked: Sequence[recall.Problem], seen: Seen, deadline: float, seed: int, pause: float
) -> None:
    """One stream at a time until the deadline, with pauses of up to `pause` seconds after bursts."""
    draw = random.Random(seed)
    with httpx.Client(base_url=url, timeout=600) as client:
        while time.monotonic() < deadline and not seen.wrong:
            for _ in range(draw.randint(1, 6)):
                number = draw.randrange(len(asked))
                seen.answer(number, ask(client, asked[number], seen))
            time.sleep(draw.random() * pause)


@contextmanager
def one_replica(folder: Path) -> Iterator[Server]:
    server = start_server(folder / "alone.log", MODEL, *FLAGS)
    try:
        yield server
    finally:
        server.stop()


@contextmanager
def group(folder: Path, num_engines: int, dp: int, has_keys: bool) -> Iterator[list[Server]]:
    flags = (*FLAGS, "--dp-attention", "--dp", str(dp))
    with ExitStack() as stack:
        if num_engines == 1:
            servers = [start_server(folder / "engine-0.log", MODEL, *flags)]
        else:
            meet = stack.enter_context(over_tcp(folder, num_engines)) if has_keys else None
            servers = spawn_engines(folder, MODEL, num_engines, *flags, meet=meet)
        for each in servers:
            stack.callback(each.kill)
        for each in servers if num_engines > 1 else ():
            wait_until_ready(each)
        yield servers
        servers[0].stop()
        codes = [each.wait() for each in servers]
        assert codes == [0] * num_engines, [each.last_line for each in servers]


def steps(servers: Sequence[Server]) -> dict[str, float]:
    """Steps by kind, and dummy steps, of all replicas."""
    counts = dict.fromkeys(("prefill", "decode", "mixed", "dummy"), 0.0)
    for each in servers:
        for name, value in read_metrics(each.url).items():
            if name.startswith("plait_steps_total"):
                kind = name.split('kind="')[1].split('"')[0]
                counts[kind] = counts.get(kind, 0.0) + value
            elif name.startswith("plait_group_dummy_steps_total"):
                counts["dummy"] += value
    return counts


def run(
    seconds: float, num_engines: int, dp: int, has_keys: bool, streams: int, folder: Path
) -> tuple[Seen, dict[str, float]]:
    asked = [problem for context in CONTEXTS for problem in recall.problems(context, 12, context)]
    with one_replica(folder) as alone, httpx.Client(base_url=alone.url, timeout=600) as client:
        expected = {number: ask(client, problem, None) for number, problem in enumerate(asked)}
    with group(folder, num_engines, dp, has_keys) as servers:
        seen, deadline = Seen(expected), time.monotonic() + seconds
        with ThreadPoolExecutor(streams) as pool:
            futures = [
                pool.submit(
                    keep_asking,
                    servers[-1 if each == 0 else 0].url,
                    asked,
                    seen,
                    deadline,
                    each,
                    2.0 if each == 0 else 0.2,
                )
                for each in range(streams)
            ]
            while time.monotonic() < deadline and not all(future.done() for future in futures):
                time.sleep(1.0)
                if time.monotonic() - seen.last_token > STALL_SECONDS:
                    raise TimeoutError(f"no token of any stream for {STALL_SECONDS:.0f} s; {steps(servers)}")
            for future in futures:
                future.result()
        return seen, steps(servers)


def main() -> None:
    """Fail if an answer differs or nothing moves."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument("--dp", type=int, default=2)
    parser.add_argument("--tcp", action="store_true", help="engines meet over TCP with CURVE, not over ipc")
    parser.add_argument("--streams", type=int, default=6)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        seen, counts = run(args.seconds, args.engines, args.dp, args.tcp, args.streams, Path(folder))
    meet = " over TCP" if args.tcp else ""
    case = (
        f"recall-mla, {args.engines} engines of {args.dp} replicas{meet}, {args.streams} streams, {args.seconds:.0f} s"
    )
    num_steps = sum(counts.values())
    with_prompts = (counts["prefill"] + counts["mixed"]) / (num_steps - counts["dummy"])
    rows = [
        Row(case, "answers_right", "answers", float(seen.num_right)),
        Row(case, "answers_wrong", "answers", float(len(seen.wrong)), 0.0),
        Row(case, "longest_gap", "s", seen.longest_gap, STALL_SECONDS),
        Row(case, "replica_steps", "steps", num_steps),
        Row(case, "replica_steps_without_rows", "ratio", counts["dummy"] / num_steps),
        Row(case, "replica_steps_with_prompts", "ratio", with_prompts),
    ]
    for row in rows:
        print(f"{row.metric:32} {row.value:10.3f} {row.unit}")
    if args.out is not None:
        result = {
            "commit": commit(),
            "command": " ".join(sys.argv),
            "machine": machine(),
            "versions": versions(),
            "rows": rows,
        }
        args.out.write_bytes(msgspec.json.format(msgspec.json.encode(result)) + b"\n")
    for line in seen.wrong:
        print(line)
    sys.exit(1 if seen.wrong else 0)


if __name__ == "__main__":
    main()
