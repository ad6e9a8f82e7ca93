"""A simulation fitted to the steps of one run, beside the figures of another run.

    python tests/bench/simulate/predicted.py --out tests/bench/results/simulate-fit.json

Serves the demo model twice with `--step-trace`, under two loads of Poisson arrivals. The cost model is fitted to the
steps of the first run; the second run's own trace is simulated with it.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

import msgspec
from plait.bench.result_file import Row, commit, machine, versions
from plait.settings import PAGE_SIZE, PageSettings, SchedulerSettings
from plait.simulate.command import run
from plait.simulate.settings import ClusterSettings, LoadSettings, SimulateSettings

PLAIT = (sys.executable, "-m", "plait.cli")
READY = "Plait is ready: "
MAX_MODEL_LEN = 2048
SCHEDULER = SchedulerSettings(max_batch_tokens=2048, max_seqs=64)
PAGES = PageSettings(page_size=PAGE_SIZE, num_pages=1024, prefix_cache=False, memory_fraction=0.85)
"""Of server and simulator alike."""
LENGTHS = ((32, 512), (16, 96))
"""Shortest and longest prompt, and answer."""


@dataclass(frozen=True, slots=True)
class Load:
    """Poisson arrivals."""

    name: str
    rate: float
    num_requests: int
    seed: int


def write_trace(path: Path, load: Load) -> None:
    """Azure's form: the bench and the simulator read the same arrivals and lengths."""
    drawn = random.Random(load.seed)
    now, lines = datetime(2026, 1, 1), ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    for _ in range(load.num_requests):
        prompt, answer = (drawn.randint(*bounds) for bounds in LENGTHS)
        lines.append(f"{now:%Y-%m-%d %H:%M:%S.%f},{prompt},{answer}")
        now += timedelta(seconds=drawn.expovariate(load.rate))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


@contextmanager
def served(records: Path) -> Iterator[str]:
    """A server of the demo model; its address."""
    flags = [f"--max-batch-tokens={SCHEDULER.max_batch_tokens}", f"--max-seqs={SCHEDULER.max_seqs}"]
    flags += [f"--page-size={PAGES.page_size}", f"--num-pages={PAGES.num_pages}", f"--max-model-len={MAX_MODEL_LEN}"]
    flags += ["--no-prefix-cache", f"--step-trace={records}"]
    words = [*PLAIT, "serve", "--port", "0", *flags]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            lines = (line.strip() for line in process.stdout)
            yield next(line for line in lines if line.startswith(READY)).removeprefix(READY)
        finally:
            process.send_signal(signal.SIGINT)
            process.stdout.read()


def measured(load: Load, folder: Path) -> dict[str, float]:
    """Serves a load; the bench's figures by name. Leaves its trace and its step records in `folder`."""
    trace = folder / f"{load.name}.csv"
    write_trace(trace, load)
    out = folder / load.name
    with served(folder / f"{load.name}.jsonl") as url:
        words = [*PLAIT, "bench", "serve", "--url", url, "--trace", str(trace), "--out", str(out), "--no-plots"]
        subprocess.run(words, check=True)
    (told,) = out.glob("*.json")
    return {row["metric"]: row["value"] for row in json.loads(told.read_bytes())["rows"]}


def simulated(load: Load, fitted_to: Load, folder: Path) -> dict[str, float]:
    """The same figures by the simulator."""
    settings = SimulateSettings(
        load=LoadSettings(trace=str(folder / f"{load.name}.csv")),
        cluster=ClusterSettings(hardware=str(folder / f"{fitted_to.name}.jsonl"), max_model_len=MAX_MODEL_LEN),
        scheduler=SCHEDULER,
        pages=PAGES,
    )
    summary = run(settings, load.name).summary
    times = {"ttft": summary.ttft_seconds, "itl": summary.itl_seconds, "e2e": summary.e2e_seconds}
    named = {
        f"{name}_{at}": seconds for name, each in times.items() for at, seconds in msgspec.to_builtins(each).items()
    }
    return {**named, "output_tokens_per_second": summary.output_tokens_per_second}


def main() -> None:
    """Write the results file."""
    parser = argparse.ArgumentParser(description="Predict one run from another's steps.")
    parser.add_argument("--rates", type=float, nargs=2, default=(1.0, 1.6), metavar="RATE", help="requests a second")
    parser.add_argument("--seconds", type=float, default=28.0, help="of each run")
    parser.add_argument("--out", type=Path, required=True)
    typed = parser.parse_args()
    fit, asked = (
        Load(name, rate, round(rate * typed.seconds), seed)
        for name, rate, seed in zip(("fitted", "predicted"), typed.rates, (1, 2), strict=True)
    )
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        seen = {load: measured(load, folder) for load in (fit, asked)}
        for load, figures in seen.items():
            for metric, value in simulated(load, fit, folder).items():
                unit = "seconds" if metric != "output_tokens_per_second" else "tokens/s"
                case = f"{load.rate:g} requests a second, {load.name}"
                rows += [
                    Row(f"{case} | measured", metric, unit, figures[metric]),
                    Row(f"{case} | simulated", metric, unit, value),
                ]
                print(f"{case:40} {metric:26} measured {figures[metric]:.4f}, simulated {value:.4f}", flush=True)
    report = {
        "commit": commit(),
        "command": "tests/bench/simulate/predicted.py",
        "machine": machine(),
        "versions": versions(),
        "rows": [msgspec.to_builtins(row) for row in rows],
    }
    typed.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
