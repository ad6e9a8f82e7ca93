"""What prefix-aware routing gains conversations: `--dp 2` against two servers whose requests go to them in turn.

    python tests/bench/dp/conversations.py --out FILE -- --threads 1
    python tests/bench/dp/conversations.py --shape qwen3-8b --out FILE

Every conversation sends its history anew with each turn, and its next turn when the answer has come. Time to first
token is that of all turns but the first; a hit is a prompt token that the prefix cache had. Both layouts get the same
conversations, each twice in alternation. `--shape` takes random weights of a model's shape in place of `--model`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import msgspec
import numpy as np
from plait.bench.result_file import Row, commit, machine, versions

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.gpu.model_shapes import write_shape
from plait_testing.metrics import read_metrics, sum_over_replicas
from plait_testing.running_server import Server, start_server

MODEL = Path(__file__).resolve().parents[2] / "models" / "recall-gqa"
TOKENS = range(10, 200)
"""In the vocabulary of every model here."""
ROUNDS = 2
LAYOUTS = {"prefix-aware, --dp 2": (1, ("--dp", "2")), "in turn, two servers": (2, ())}
"""Servers, and the flags of each."""


@dataclass(frozen=True, slots=True)
class Talk:
    """What every conversation is made of, in tokens."""

    num_turns: int
    first: int
    more: int
    """Of each further turn."""
    answer: int


@dataclass(frozen=True, slots=True)
class Measured:
    """One layout under the load."""

    first_token_seconds: list[float]
    hit_share: float


def hold(talk: Talk, seed: int, next_url: Callable[[], str]) -> list[float]:
    """A conversation: seconds to the first token of each turn but the first."""
    draw = random.Random(seed)
    history = draw.choices(TOKENS, k=talk.first)
    seconds = []
    for _ in range(talk.num_turns):
        waited, answer = ask(next_url(), history, talk.answer)
        seconds.append(waited)
        history += [*answer, *draw.choices(TOKENS, k=talk.more)]
    return seconds[1:]


def ask(url: str, prompt: list[int], num_tokens: int) -> tuple[float, list[int]]:
    body = {"prompt": prompt, "max_tokens": num_tokens, "ignore_eos": True, "temperature": 0, "stream": True}
    began, waited, tokens = time.monotonic(), 0.0, list[int]()
    with httpx.stream("POST", f"{url}/v1/completions", json=body | {"return_token_ids": True}, timeout=600) as streamed:
        streamed.raise_for_status()
        for line in streamed.iter_lines():
            if line.startswith("data: {"):
                waited = waited or time.monotonic() - began
                tokens += json.loads(line.removeprefix("data: "))["choices"][0]["token_ids"]
    return waited, tokens


@contextmanager
def servers(model: Path, num_servers: int, flags: Sequence[str]) -> Iterator[list[Server]]:
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        started = []
        for number in range(num_servers):
            started.append(start_server(Path(folder) / f"{number}.log", model, *flags))
            stack.callback(started[-1].kill)
            if not started[-1].url:
                raise SystemExit(f"no server: {started[-1].errors[-4000:]}")
        yield started


def measure(model: Path, layout: str, talk: Talk, seed: int, options: argparse.Namespace) -> Measured:
    num_servers, flags = LAYOUTS[layout]
    with servers(model, num_servers, [*flags, *options.serve_flags]) as started:
        urls = itertools.cycle([server.url for server in started])
        with ThreadPoolExecutor(options.conversations) as pool:
            seeds = range(seed, seed + options.conversations)
            found = list(pool.map(lambda each: hold(talk, each, lambda: next(urls)), seeds))
        counted = [sum_over_replicas(read_metrics(server.url)) for server in started]
    hits, prompts = (sum(each[f"plait_{name}_tokens_total"] for each in counted) for name in ("prefix_hit", "prompt"))
    return Measured(list(itertools.chain(*found)), hits / prompts)


def rows(layout: str, runs: Sequence[Measured]) -> Iterator[Row]:
    seconds = [each for run in runs for each in run.first_token_seconds]
    yield Row(layout, "hit_share", "1", float(np.mean([run.hit_share for run in runs])))
    for percent in (50, 90):
        yield Row(layout, f"first_token_p{percent}", "seconds", float(np.percentile(seconds, percent)))


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--shape", help="of random weights, in place of --model")
    parser.add_argument(
        "--conversations", type=int, default=7, help="odd: turns that go in step would stay at a server"
    )
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--first", type=int, default=1500, help="tokens of a conversation's first turn")
    parser.add_argument("--more", type=int, default=200, help="tokens of each further turn")
    parser.add_argument("--answer", type=int, default=32, help="tokens")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("serve_flags", nargs="*", help="further flags of plait serve, behind --")
    options = parser.parse_args(words)
    talk = Talk(options.turns, options.first, options.more, options.answer)
    runs: dict[str, list[Measured]] = {layout: [] for layout in LAYOUTS}
    with tempfile.TemporaryDirectory() as kept:
        if options.shape:
            write_shape(options.shape, Path(kept))
            options.serve_flags += ["--load-format", "dummy"]
        model = Path(kept) if options.shape else options.model
        for number, layout in itertools.product(range(ROUNDS), LAYOUTS):
            runs[layout].append(measure(model, layout, talk, 1000 * number, options))
            print(layout, runs[layout][-1].hit_share, np.median(runs[layout][-1].first_token_seconds), flush=True)
    result = {
        "commit": commit(),
        "command": " ".join(["tests/bench/dp/conversations.py", *sys.argv[1:]]),
        "machine": machine(),
        "versions": versions(),
        "rows": [row for layout, found in runs.items() for row in rows(layout, found)],
    }
    options.out.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")


if __name__ == "__main__":
    main()
