"""What planning costs: times, and instructions, which other work on the machine does not change.

    python tests/bench/scheduler/plan_cost.py --out tests/bench/results/scheduler.json

Runs the programs of the core and of the wire (`router/core/examples/plan_cost.rs`, `proto/examples/timing.rs`), the
core's main property and the hour of a real trace. Valgrind's callgrind counts the instructions of plan + advance alone.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import timeit
from collections.abc import Iterator
from pathlib import Path

import msgspec
import plait_proto
from plait.bench.record import Row, commit, machine, versions
from plait.simulate.command import run
from plait.simulate.settings import ClusterSettings, LoadSettings, SimulateSettings

ROOT = Path(__file__).resolve().parents[3]
LIBRARIES = ("plait", "msgspec")
GOALS = {
    **{
        (f"plan + advance, {num_decoders} decoders, context {context}, cache {cache}", percentile): goal
        for num_decoders, goals in (
            (256, {"p50": 40e-6, "p99": 120e-6}),
            (1024, {"p50": 150e-6}),
            (4096, {"p50": 700e-6}),
        )
        for context in (8192, 131072)
        for cache in ("empty", "full")
        for percentile, goal in goals.items()
    },
    ("admit 8192 tokens, pool of 131072 pages, cache full", "p50"): 150e-6,
    ("verdict for 64 replicas, by function call", "p50"): 5e-6,
    ("encode a decode plan of 256 rows", "mean"): 5e-6,
    ("encode a decode plan of 256 rows", "bytes"): 4000.0,
    ("decode a decode plan of 256 rows in Python", "mean"): 50e-6,
    ("property tests", "plans_per_second"): 1e5,
    ("simulate azure_llm_2023_conv, 8 replicas", "duration"): 60.0,
}
"""Seconds and bytes that are asked for at most, plans a second at least."""
COUNTED = ((32, 1024), (256, 1024), (256, 8192), (256, 131072), (1024, 1024), (4096, 1024))
"""Decoders and context whose instructions are counted."""
NUM_COUNTED_STEPS = 200
NUM_CASES = 20_000
NUM_DECODES = 10_000


def row(case: str, metric: str, unit: str, value: float) -> Row:
    return Row(case, metric, unit, value, GOALS.get((case, metric)))


def seconds(micros: float) -> float:
    """To the hundredth of a microsecond."""
    return round(micros * 1e-6, 8)


def cargo(*words: str) -> list[str]:
    return [sys.executable, str(ROOT / "tools" / "cargo.py"), words[0], "--locked", "--quiet", *words[1:]]


def built(package: str, example: str) -> str:
    """Builds a program; its path."""
    subprocess.run(cargo("build", "--release", "-p", package, "--example", example), check=True, cwd=ROOT)
    return str(ROOT / os.environ.get("CARGO_TARGET_DIR", "target") / "release" / "examples" / example)


def timed(program: str) -> Iterator[Row]:
    """Every figure that a program tells, a JSON object a line; its times are in microseconds."""
    told = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    for figures in map(json.loads, told.splitlines()):
        case = figures.pop("case")
        for metric, value in figures.items():
            if metric == "bytes":
                yield row(case, metric, "bytes", value)
            else:
                yield row(case, metric, "seconds", seconds(value))


def counted(program: str) -> Iterator[Row]:
    """Instructions of one plan + advance, without what prepares it."""
    if shutil.which("valgrind") is None:
        raise SystemExit("plan_cost: valgrind is not installed; instructions are the steady measure, so install it")
    for cache in ("empty", "full"):
        for num_decoders, context in COUNTED:
            words = [program, *map(str, (num_decoders, context, NUM_COUNTED_STEPS)), cache]
            value = num_instructions(words) / NUM_COUNTED_STEPS
            case = f"plan + advance, {num_decoders} decoders, context {context}, cache {cache}"
            yield row(case, "instructions", "instructions", round(value))


def num_instructions(program: list[str]) -> int:
    """Instructions inside `step` of a whole run."""
    with tempfile.TemporaryDirectory() as folder:
        valgrind = [
            "valgrind",
            "--tool=callgrind",
            "--toggle-collect=*plan_cost::step",
            f"--callgrind-out-file={folder}/out",
        ]
        told = subprocess.run([*valgrind, *program], check=True, capture_output=True, text=True).stderr
    found = re.search(r"Collected\s*:\s*(\d+)", told)
    if found is None or found[1] == "0":
        raise RuntimeError(f"callgrind counted nothing: {told}")
    return int(found[1])


def decoded_in_python() -> Row:
    """A plan of 256 decode rows, as `proto/examples/timing.rs` encodes it."""
    rows = [word for slot in range(256) for word in (slot, 1000 + slot)]
    pages = [word for slot in range(8) for word in (slot, 10_000 + slot)]
    plan = plait_proto.Plan(
        step=70_000,
        num_prefill=0,
        num_decode=256,
        new_slots=(),
        verdict=None,
        rows=words_of(rows),
        token_ids=b"",
        appended_pages=words_of(pages),
        freed_slots=b"",
    )
    frames = plait_proto.encode(plan)
    mean = timeit.timeit(lambda: plait_proto.decode(frames), number=NUM_DECODES) / NUM_DECODES
    return row("decode a decode plan of 256 rows in Python", "mean", "seconds", seconds(mean * 1e6))


def words_of(numbers: list[int]) -> bytes:
    return b"".join(number.to_bytes(4, "little") for number in numbers)


def properties() -> Row:
    """How many plans the main property checks in a second, overflow and assertions checked as in `make test`."""
    test = ["properties::speed_of_the_main_property", "--exact", "--ignored", "--nocapture"]
    command = [*cargo("test", "-p", "plait-core", "--test", "core"), "--", *test]
    environment = {**os.environ, "PLAIT_CASES": str(NUM_CASES)}
    told = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT, env=environment).stdout
    found = re.search(r"(\d+) plans in ([\d.]+) s", told)
    if found is None:
        raise RuntimeError(f"the property told no figure: {told}")
    return row("property tests", "plans_per_second", "plans/s", round(int(found[1]) / float(found[2])))


def simulated(trace: Path) -> Row:
    """The hour of a real trace at 8 replicas, as `plait simulate` runs it."""
    settings = SimulateSettings(load=LoadSettings(trace=str(trace)), cluster=ClusterSettings(replicas=8))
    begin = time.perf_counter()
    run(settings, "simulate")
    return row(f"simulate {trace.stem}, 8 replicas", "duration", "seconds", round(time.perf_counter() - begin, 3))


def main() -> None:
    """Write the results file."""
    parser = argparse.ArgumentParser(description="Measure the scheduler.")
    parser.add_argument("--trace", type=Path, default=ROOT.parent / "shared" / "data" / "azure_llm_2023_conv.csv")
    parser.add_argument("--out", type=Path, required=True)
    typed = parser.parse_args()
    program = built("plait-core", "plan_cost")
    rows = [
        *timed(program),
        *timed(built("plait-proto", "timing")),
        decoded_in_python(),
        properties(),
        simulated(typed.trace),
        *counted(program),
    ]
    report = {
        "commit": commit(),
        "command": "make bench-scheduler",
        "machine": machine(),
        "versions": versions(LIBRARIES),
        "rows": [msgspec.to_builtins(one) for one in rows],
    }
    typed.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
