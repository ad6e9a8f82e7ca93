"""What a loaded server loses to what some of its requests ask for: JSON schemas, penalties, one slow grammar.

    python tests/bench/gpu/fields_load.py --shape qwen3-8b --out FILE [--tokenizer FILE] [-- FLAGS OF PLAIT SERVE]

128/128 tokens at 256 streams, greedy, end tokens ignored, without a prefix cache: plain, with a frequency penalty, with
20% and all of the requests under a JSON schema, and beside streams under a grammar whose masks are slow. The loads run
in turns, `--rounds` times, against one server; a figure is the median of its rounds. Gaps are those of the rows that
ask for nothing. `--tokenizer` is a `tokenizer.json` of the shape's vocabulary; without it the words are random.
`--shape tiny` is a dry run on a CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import msgspec
import torch
from plait.bench.cases import cases
from plait.bench.client_pool import ClientPool
from plait.bench.load import body_prompt, build_load
from plait.bench.measure import Bench as Loader
from plait.bench.metrics import timed_request
from plait.bench.percentiles import percentile
from plait.bench.result_file import commit, machine, versions
from plait.bench.run import Run, send
from plait.bench.settings import BenchSettings, LoadSettings, PaceSettings, ServerSettings

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.gpu.model_shapes import SHAPES, write_shape
from plait_testing.metrics import read_metrics
from plait_testing.running_server import Server, start_server

PROFILED = Path(__file__).parents[2] / "plait_testing" / "profiled"

Fields = dict[str, Any]
Ask = Callable[[int], Fields]
SIZES = {"qwen3-8b": (256, 768, 128), "tiny": (4, 12, 24)}
"""By shape: streams, requests of a load, tokens of a prompt and of an answer."""
FLAGS = ("--no-prefix-cache", "--load-format", "dummy", "--max-seqs", "258", "--max-batch-tokens", "8192")
TEXT = {"type": "string", "maxLength": 60}
SCHEMAS: list[Fields] = [
    {
        "type": "object",
        "properties": {
            "name": TEXT,
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "mail": {"type": "string"},
            "address": {
                "type": "object",
                "properties": {name: TEXT for name in ("street", "city", "state", "country", "note")},
                "required": ["street", "city", "state", "country", "note"],
                "additionalProperties": False,
            },
            "tags": {"type": "array", "items": TEXT, "minItems": 8},
        },
        "required": ["name", "age", "mail", "address", "tags"],
        "additionalProperties": False,
    },
    {
        "type": "array",
        "minItems": 40,
        "items": {
            "type": "object",
            "properties": {
                "kind": {"enum": ["create", "update", "delete"]},
                "id": {"type": "string", "pattern": "^[a-f0-9]{8}-[a-f0-9]{4}$"},
                "amount": {"type": "number"},
                "reason": {"type": "string"},
            },
            "required": ["kind", "id", "amount", "reason"],
            "additionalProperties": False,
        },
    },
    {
        "type": "object",
        "properties": {f"step_{index}": {"anyOf": [{"type": "string"}, {"type": "null"}]} for index in range(40)},
        "required": [f"step_{index}" for index in range(40)],
        "additionalProperties": False,
    },
]


def schema(index: int, is_compact: bool = True) -> Fields:
    """One after the other. Random weights write much more white space than a model that was trained: mostly none."""
    asked = {"json": SCHEMAS[index % len(SCHEMAS)]}
    return {"structured_outputs": asked | ({"disable_any_whitespace": True} if is_compact else {})}


def in_share(share: float) -> Ask:
    """Evenly spread requests under a schema."""
    return lambda index: schema(index) if int((index + 1) * share) > int(index * share) else {}


PLAIN = "no fields"
ALL = "all under a JSON schema"
LOADS: dict[str, tuple[Ask, dict[str, float]]] = {
    PLAIN: (lambda _index: {}, {}),
    "frequency_penalty 0.5": (lambda _index: {"frequency_penalty": 0.5}, {"rate": 0.95}),
    "20% under a JSON schema": (in_share(0.2), {"rate": 0.98, "free_itl_p99": 1.05}),
    ALL: (in_share(1.0), {"rate": 0.95}),
    "all under a JSON schema, any white space": (lambda index: schema(index, is_compact=False), {"rate": 0.95}),
}
"""What each request asks for, and the goals: a rate of at least, times of at most, over those of the plain load."""
PROFILE_AFTER_SECONDS = 2.0
SLOW = "beside a slow grammar"
SLOW_GOALS = {"free_itl_p99": 1.1, "free_itl_max": 1.5}


@dataclass(frozen=True)
class Figures:
    """Of one load; seconds."""

    rate: float
    """Output tokens a second of all requests."""
    itl_p50: float
    itl_p99: float
    free_itl_p99: float
    """Of the requests that ask for nothing; of all where each asks."""
    free_itl_max: float
    num_failed: float
    num_short: float
    """Requests that ended before their length."""
    rows_left_out: float


class Loads:
    """Loads against one server."""

    def __init__(self, server: Server, shape: str) -> None:
        self.server = server
        streams, num_prompts, length = SIZES[shape]
        self.settings = BenchSettings(
            server=ServerSettings(url=server.url, count_by="token-ids"),
            load=LoadSettings(num_prompts=num_prompts, input_len=f"{length}", output_len=f"{length}"),
            pace=PaceSettings(concurrency=streams),
        )
        self.loader = Loader(self.settings, [server.url])
        self.seed = 0

    def run(self, ask: Ask) -> Figures:
        """One load with other prompts than those before."""
        (case,), (asked,) = cases(self.settings), self.loader.servers
        self.seed += 1
        load = build_load(case, self.seed, f"fields {self.seed}", None)
        before = _left_out(self.server)
        bodies = (
            _with_fields(asked.body(body_prompt(one, self.loader._maker), one.output_len), ask(index))
            for index, one in enumerate(load.requests)
        )
        with ClientPool(self.loader._num_processes(case)) as clients:
            clients.load(asked.setup(), bodies)
            run = send(clients, load, asked, self.seed, None, lambda _ended, _in_flight: None)
        return _figures(run, ask, _left_out(self.server) - before)


def _with_fields(body: bytes, fields: Fields) -> bytes:
    return msgspec.json.encode(msgspec.json.decode(body) | fields) if fields else body


def _left_out(server: Server) -> float:
    return sum(value for name, value in read_metrics(server.url).items() if name.startswith("plait_late_masks_total"))


def _figures(run: Run, ask: Ask, rows_left_out: float) -> Figures:
    done = [outcome for outcome in run.outcomes if outcome.failure is None]
    timed = [timed_request(run, outcome) for outcome in done]
    asks = {index: bool(ask(index)) for index in range(len(run.load.requests))}
    wanted = {index: one.output_len for index, one in enumerate(run.load.requests)}
    gaps = [gap for one in timed for gap in one.gaps]
    free = [gap for one in timed if not asks[one.index] for gap in one.gaps] or gaps
    seconds = max(outcome.freed for outcome in run.outcomes) - run.begun
    return Figures(
        rate=sum(one.num_output_tokens for one in timed) / seconds,
        itl_p50=percentile(sorted(gaps), 50),
        itl_p99=percentile(sorted(gaps), 99),
        free_itl_p99=percentile(sorted(free), 99),
        free_itl_max=max(free),
        num_failed=len(run.outcomes) - len(done),
        num_short=sum(one.num_output_tokens < wanted[one.index] for one in timed),
        rows_left_out=rows_left_out,
    )


@contextmanager
def slow_streams(url: str, model: str, grammar: Fields, num: int) -> Iterator[None]:
    """Streams under the grammar that answer until the end of the block."""
    over = threading.Event()

    def keep_asking() -> None:
        body = {"model": model, "prompt": [5, 6, 7], "max_tokens": 2000, "ignore_eos": True, "stream": True}
        with httpx.Client(timeout=600) as client:
            while not over.is_set():
                with client.stream("POST", f"{url}/v1/completions", json=body | grammar) as answer:
                    if answer.status_code != 200:
                        raise SystemExit(f"the slow grammar is refused: {answer.read().decode()[:500]}")
                    next((piece for piece in answer.iter_raw() if over.is_set()), None)

    threads = [threading.Thread(target=keep_asking) for _ in range(num)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


def use_tokenizer(model: Path, tokenizer: Path) -> None:
    """Give a model's folder another tokenizer, whose first special token ends an answer: the shape's may be a quote."""
    (model / "tokenizer.json").write_bytes(tokenizer.read_bytes())
    end = next(token["id"] for token in json.loads(tokenizer.read_text())["added_tokens"] if token["special"])
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"bos_token_id": end, "eos_token_id": end}))


def rows(found: dict[str, list[Figures]]) -> list[dict[str, object]]:
    """Each figure's median, and what has a goal as a ratio of the plain load's."""
    made: list[dict[str, object]] = []
    medians = {name: _medians(runs) for name, runs in found.items()}
    for name, figures in medians.items():
        for metric, value in figures.items():
            unit = "tokens/s" if metric == "rate" else "seconds" if "itl" in metric else "count"
            made.append({"case": name, "metric": metric, "unit": unit, "value": round(value, 5), "goal": None})
        for metric, goal in (SLOW_GOALS if name == SLOW else LOADS[name][1]).items():
            pairs = zip(found[name], found[PLAIN], strict=True)
            ratios = [getattr(one, metric) / getattr(plain, metric) for one, plain in pairs]
            ratio = round(statistics.median(ratios), 4)
            made.append(
                {"case": name, "metric": f"{metric} over that of the plain load", "unit": "share", "value": ratio}
                | {"goal": goal, "of_each_round": [round(one, 4) for one in ratios]}
            )
    return made


def _medians(runs: list[Figures]) -> dict[str, float]:
    names = Figures.__dataclass_fields__
    return {name: statistics.median(getattr(one, name) for one in runs) for name in names}


def write(found: dict[str, list[Figures]], out: Path, words: list[str]) -> None:
    device = {"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}
    result = {
        "commit": commit(),
        "command": " ".join(["tests/bench/gpu/fields_load.py", *words]),
        "machine": device | machine(),
        "versions": versions(("plait", "torch")),
        "rows": rows({name: runs for name, runs in found.items() if runs}),
    }
    out.write_text(json.dumps(result, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SIZES, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokenizer", type=Path, help="tokenizer.json to use in place of the shape's")
    parser.add_argument("--slow-grammar", type=Path, help="JSON of request fields; adds the load beside such streams")
    parser.add_argument("--only", default="", help="regular expression: loads whose names match, and the plain one")
    parser.add_argument("--profile", type=Path, help="prefix of two traces of 60 steps: plain, and all under a schema")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("serve_flags", nargs="*", help="further flags of plait serve, behind --")
    options = parser.parse_args()
    assert options.shape in SHAPES
    chosen = {name: ask for name, (ask, _) in LOADS.items() if name == PLAIN or re.search(options.only, name)}
    found: dict[str, list[Figures]] = {name: [] for name in [*chosen, *[SLOW] * bool(options.slow_grammar)]}
    with TemporaryDirectory() as folder:
        model = Path(folder) / options.shape
        write_shape(options.shape, model)
        if options.tokenizer:
            use_tokenizer(model, options.tokenizer)
        if options.profile:
            os.environ["PLAIT_TEST_PROFILE"] = str(options.profile)
            os.environ["PYTHONPATH"] = os.pathsep.join([str(PROFILED), os.environ.get("PYTHONPATH", "")])
        server = start_server(Path(folder) / "serve.log", model, *FLAGS, *options.serve_flags)
        if not server.url:
            raise SystemExit(f"no server: {server.errors[-3000:]}")
        try:
            loads = Loads(server, options.shape)
            for name, ask in chosen.items():  # what is compiled at its first use is compiled now
                print("first", name, loads.run(ask), flush=True)
            for _ in range(options.rounds):
                for name, ask in chosen.items():
                    found[name].append(loads.run(ask))
                    print(name, found[name][-1], flush=True)
                if options.slow_grammar:
                    fields = json.loads(options.slow_grammar.read_text())
                    with slow_streams(server.url, options.shape, fields, 1):
                        found[SLOW].append(loads.run(LOADS[PLAIN][0]))
                    print(SLOW, found[SLOW][-1], flush=True)
                write(found, options.out, sys.argv[1:])
            for name in (PLAIN, ALL) if options.profile else ():
                threading.Timer(PROFILE_AFTER_SECONDS, options.profile.touch).start()
                loads.run(LOADS[name][0])
                trace = Path(f"{options.profile}.trace.json")
                trace.rename(trace.with_name(f"{trace.stem}-{name.replace(' ', '-')}.json"))
        finally:
            server.stop()
            print(server.errors[-1500:])


if __name__ == "__main__":
    main()
