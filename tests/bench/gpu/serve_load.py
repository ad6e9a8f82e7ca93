"""A shape's loads through a server's front door, and whether their figures count: one JSON.

    python tests/bench/gpu/serve_load.py --shape qwen3-8b --out FILE [--only 128/128] [-- FLAGS OF PLAIT SERVE]

First the machine's ceilings (`ceilings.py`), then each load by `plait bench` against one server process with random
weights and without a prefix cache, at last the streams that it kept, by a plain server (`rescoring`). A run counts
where no request failed, the client was never late and the streams were right. `--shape tiny` is a dry run on a CPU.
The weights are drawn by the server, or read from a checkpoint that is written to `--checkpoint`, on a file system in
memory. How long each server took to be ready, and what it spent that on, is among the rows. Shapes that end in `tp2`
or `dp2` have the goals of two GPUs: `-- --tp 2`, `-- --dp 2 --dp-attention`; in `fp8` of `-- --quantization fp8`.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from plait.bench.result_file import commit, machine, versions

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.gpu.load_cases import LOADED, RATE, LoadCase
from bench.gpu.model_shapes import SHAPES, write_shape
from bench.gpu.rescoring import LARGEST_FLOOR, MAX_BATCH_TOKENS, MAX_SEQS, SERVE_FLAGS, Gaps, rescore, rescore_fp8
from bench.gpu.roofline import NOMINAL, Ceilings, ModelCost, model_cost, most_tokens_per_second
from bench.gpu.seeded_checkpoint import write_checkpoint
from bench.gpu.server_starts import Start
from plait_testing.running_server import Server, start_server

BASE_FLAGS = ("--no-prefix-cache",)
LOADED_FLAGS = ("--max-seqs", "256", "--max-batch-tokens", "8192")
NUM_STREAMS = 16
"""Kept and scored again, of each load."""
BENCH_SECONDS = 180.0
METRICS = {
    RATE: "tokens/s",
    "requests_per_second": "requests/s",
    "num_failed": "requests",
    **{f"{name}_{part}": "seconds" for name in ("ttft", "itl", "e2e") for part in ("p50", "p99", "max")},
}
"""Of what `plait bench` tells, what is kept."""
SHARE_OF_GREEDY = 0.97
"""The least share of the greedy rate for loads with random sampling."""
LIBRARIES = ("plait", "torch", "triton", "flashinfer-python")


@dataclass
class Ran:
    """A load that was run."""

    case: LoadCase
    figures: dict[str, float]
    reasons: list[str]
    """Why it does not count."""
    streams: list[Any] = field(default_factory=list)
    gaps: Gaps | None = None


@dataclass
class Bench:
    """One shape on one machine."""

    model: Path
    cost: ModelCost
    ceilings: Ceilings | None
    """None on a CPU."""
    logs: Path
    serve_flags: Sequence[str]
    batch_flags: Sequence[str] = LOADED_FLAGS
    num_gpus: int = 1
    starts: list[Start] = field(default_factory=list)
    runs: list[Ran] = field(default_factory=list)

    def run_all(self, cases: Sequence[LoadCase]) -> Iterator[Ran]:
        """Each load, on a server for those of the same flags."""
        for number, (flags, group) in enumerate(itertools.groupby(cases, key=lambda case: case.serve_flags)):
            # A group has no step trace.
            is_traced = "--dp-attention" not in self.serve_flags
            records = ("--step-trace", str(self.logs / f"steps-{number}.jsonl")) if is_traced else ()
            with self.serving(f"serve-{number}", *self.batch_flags, *self.serve_flags, *records, *flags) as server:
                for case in group:
                    self.runs.append(self._load(server, case))
                    yield self.runs[-1]

    def _load(self, server: Server, case: LoadCase) -> Ran:
        folder = self.logs / f"bench-{len(self.runs)}"
        words = ["--url", server.url, "--no-plots", "--warmup", "4", "--count-by", "token-ids"]
        words += ["--keep-streams", f"{NUM_STREAMS}", "--requests"]
        command = [sys.executable, "-m", "plait.cli", "bench", "serve", *words, "--out", str(folder)]
        try:
            done = subprocess.run(
                [*command, *case.bench_words()], capture_output=True, text=True, timeout=BENCH_SECONDS, check=False
            )
        except subprocess.TimeoutExpired:
            return Ran(case, {}, [f"plait bench had not ended after {BENCH_SECONDS:g} s"])
        written = next(folder.glob("bench-serve*.json"), None)
        if written is None:
            return Ran(case, {}, [f"plait bench ended with {done.returncode}: {done.stderr[-300:]}"])
        return _read(case, json.loads(written.read_text()))

    def score(self) -> Iterator[Ran]:
        """Score the streams of every load again, by one plain server in a process of its own."""
        limits = ("--max-seqs", f"{MAX_SEQS}", "--max-batch-tokens", f"{MAX_BATCH_TOKENS}")
        rules = self.logs / "fp8_rules.json"
        with (
            _plain_fp8_ranks(rules) if self.is_fp8 else nullcontext(),
            self.serving("rescore", *limits, *SERVE_FLAGS, *self._weight_flags()) as server,
        ):
            for ran in self.runs:
                if ran.streams and not ran.case.is_drawn:
                    ran.gaps = self._rescore(server.url, ran, rules)
                yield ran

    def _rescore(self, url: str, ran: Ran, rules: Path) -> Gaps:
        if not self.is_fp8:
            return rescore(url, self.model.name, ran.streams)
        return rescore_fp8(url, self.model.name, ran.streams, rules, ran.case.streams)

    @contextmanager
    def serving(self, name: str, *flags: str) -> Iterator[Server]:
        """A server of the model that ends with the block."""
        began = time.perf_counter()
        server = start_server(self.logs / f"{name}.log", self.model, *BASE_FLAGS, *self._load_flags(), *flags)
        try:
            if not server.url:
                raise SystemExit(f"no server: {server.last_line}")
            self.starts.append(Start(name, time.perf_counter() - began, server.errors))
            yield server
        finally:
            server.stop()

    def _weight_flags(self) -> Sequence[str]:
        """Of the serve flags those that change the weights."""
        return ("--quantization", "fp8") if self.is_fp8 else ()

    @property
    def is_fp8(self) -> bool:
        """Whether matrices are quantised as they are read."""
        return "fp8" in self._value_of("--quantization")

    def _value_of(self, flag: str) -> Sequence[str]:
        return [value for name, value in itertools.pairwise(self.serve_flags) if name == flag]

    def _load_flags(self) -> Sequence[str]:
        has_files = any(self.model.glob("*.safetensors"))
        return () if has_files else ("--load-format", "dummy")

    def share(self, case: LoadCase) -> float:
        """This machine's roofline over the nominal one's; for an open loop, which prompts bound, the GEMM rates."""
        if self.ceilings is None:
            return 1.0
        here, nominal = self.floor(case, self.ceilings), self.floor(case, NOMINAL)
        return here / nominal if here and nominal else self.ceilings.gemm / NOMINAL.gemm

    def floor(self, case: LoadCase, ceilings: Ceilings) -> float | None:
        """Tokens a second that a closed loop of fixed lengths cannot pass."""
        if case.streams is None or isinstance(case.lengths, str):
            return None
        return most_tokens_per_second(self.cost, case.streams, *case.lengths, ceilings)

    def greedy_rate(self, case: LoadCase) -> float | None:
        """Tokens a second of the same load, greedy."""
        greedy = dataclasses.replace(case, bench_flags=())
        return next((ran.figures.get(RATE) for ran in self.runs if ran.case.name == greedy.name), None)


@contextmanager
def _plain_fp8_ranks(rules: Path) -> Iterator[None]:
    """Ranks that start within compute FP8 by the rules of a file."""
    tests = Path(__file__).parents[2]
    given = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(tests / "plait_testing" / "plain_fp8"), str(tests), given])
    os.environ["PLAIT_TEST_FP8_RULES"] = str(rules)
    try:
        yield
    finally:
        os.environ["PYTHONPATH"] = given
        del os.environ["PLAIT_TEST_FP8_RULES"]


def _read(case: LoadCase, result: dict[str, Any]) -> Ran:
    (run,) = result["runs"]
    figures = {row["metric"]: row["value"] for row in result["rows"] if row["metric"] in METRICS}
    failed = [f"{num} requests failed: {kind}" for kind, num in run["failures"].items()]
    return Ran(case, figures, [*run["invalid_because"], *failed], run.get("streams", []))


def rows(bench: Bench, ran: Ran) -> list[dict[str, object]]:
    """The figures of a load with its goals, its share of the floor, and what its rescored streams say."""
    case, share = ran.case, bench.share(ran.case)
    goals = {goal.metric: goal for goal in case.goals}
    made: list[dict[str, object]] = []
    for metric, value in ran.figures.items():
        row = {"case": case.name, "metric": metric, "unit": METRICS[metric], "value": round(value, 5), "goal": None}
        if goal := goals.get(metric):
            scaled = {"scaled_goal": round(goal.scaled(share), 5), "is_met_scaled": goal.is_met(value, share)}
            row |= {"goal": goal.value, "is_met": goal.is_met(value), **scaled}
        made.append(row)
    found: list[tuple[str, str, float, float | None]] = []
    if RATE in ran.figures and bench.ceilings is not None and (floor := bench.floor(case, bench.ceilings)):
        found.append(("share_of_roofline", "share", ran.figures[RATE] / floor / bench.num_gpus, None))
    if RATE in ran.figures and case.is_drawn and (greedy := bench.greedy_rate(case)):
        found.append(("share_of_greedy", "share", ran.figures[RATE] / greedy, SHARE_OF_GREEDY))
    if ran.gaps is not None and ran.gaps.values:
        found += [
            ("rescored_tokens", "tokens", len(ran.gaps.values), None),
            ("gap_median", "nats", ran.gaps.median, ran.gaps.median_bound),
            ("gap_max", "nats", max(ran.gaps.values), ran.gaps.worst_bound),
        ]
    if ran.gaps is not None and ran.gaps.floor:
        found += [
            ("rounding_gap_median", "nats", statistics.median(ran.gaps.floor), LARGEST_FLOOR),
            ("rounding_gap_max", "nats", max(ran.gaps.floor), None),
        ]
    return made + [
        {"case": case.name, "metric": metric, "unit": unit, "value": round(value, 5), "goal": goal}
        for metric, unit, value, goal in found
    ]


def validity(ran: Ran) -> dict[str, object]:
    """Whether the figures count, and why not."""
    reasons = list(ran.reasons)
    if ran.case.is_drawn:
        reasons.append("tokens that are drawn need not be the best: no stream was scored again")
    elif ran.gaps is None:
        reasons.append("no stream was scored again")
    elif ran.gaps.num_streams < min(NUM_STREAMS, ran.case.num_prompts):
        reasons.append(f"only {ran.gaps.num_streams} streams were scored again")
    elif not ran.gaps.is_right:
        reasons.append("its streams are not those of the plain server")
    return {
        "case": ran.case.name,
        "counts": not reasons,
        "because": reasons,
        "rescored_streams": ran.gaps.num_streams if ran.gaps else 0,
    }


def write(bench: Bench, out: Path, words: Sequence[str]) -> None:
    """The results so far."""
    device = {"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}
    measured = [] if bench.ceilings is None else _ceiling_rows(bench.ceilings)
    result = {
        "commit": commit(),
        "command": " ".join(["tests/bench/gpu/serve_load.py", *words]),
        "machine": device | machine(),
        "versions": versions(LIBRARIES),
        "rows": [
            *measured,
            *(row for ran in bench.runs for row in rows(bench, ran)),
            *(row for start in bench.starts for row in start.rows()),
        ],
        "validity": [validity(ran) for ran in bench.runs],
    }
    out.write_text(json.dumps(result, indent=1) + "\n")


def _ceiling_rows(ceilings: Ceilings) -> list[dict[str, object]]:
    given = (
        ("bf16 GEMM", "TFLOP/s", ceilings.gemm / 1e12, NOMINAL.gemm / 1e12),
        ("copy", "TB/s", ceilings.copy / 1e12, NOMINAL.copy / 1e12),
    )
    return [
        {"case": case, "metric": "rate", "unit": unit, "value": round(value, 4), "goal": goal}
        for case, unit, value, goal in given
    ]


def measure_ceilings(folder: Path) -> Ceilings | None:
    """This machine's, from `ceilings.py` in its own process; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    out = folder / "ceilings.json"
    subprocess.run(
        [sys.executable, str(Path(__file__).with_name("ceilings.py")), "--out", str(out)], check=True, timeout=120
    )
    gemm, copy = (row["value"] * 1e12 for row in json.loads(out.read_text())["rows"])
    return Ceilings(gemm, copy)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=LOADED, required=True)
    parser.add_argument("--only", default="", help="regular expression: loads whose names match")
    parser.add_argument(
        "--share", type=float, default=1.0, help="of each load's requests; for whether streams are right"
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--checkpoint", type=Path, help="folder in memory for a checkpoint to serve; one that lies there is taken"
    )
    parser.add_argument(
        "--logs", type=Path, help="new folder for the servers' lines and steps and each request's times"
    )
    parser.add_argument("serve_flags", nargs="*", help="further flags of plait serve, behind --")
    options = parser.parse_args()
    loaded = LOADED[options.shape]
    with TemporaryDirectory() as kept:
        folder = Path(kept)
        model = (options.checkpoint or folder) / loaded.shape
        write_shape(loaded.shape, model)
        if options.checkpoint and not any(model.glob("*.index.json")):
            write_checkpoint(model)
        logs = options.logs or folder / "logs"
        logs.mkdir(parents=True)
        cost = model_cost(SHAPES[loaded.shape])
        bench = Bench(model, cost, measure_ceilings(folder), logs, options.serve_flags, num_gpus=loaded.num_gpus)
        print(f"ceilings: {bench.ceilings}", flush=True)
        chosen = loaded.chosen(lambda case: re.search(options.only, case.name) is not None)
        for ran in bench.run_all([case.shortened(options.share) for case in chosen]):
            print(ran.case.name, ran.figures, *ran.reasons, flush=True)
            write(bench, options.out, sys.argv[1:])
        for ran in bench.score():
            write(bench, options.out, sys.argv[1:])
            print(validity(ran), *([ran.gaps.median, max(ran.gaps.values)] if ran.gaps else []), flush=True)


if __name__ == "__main__":
    main()
