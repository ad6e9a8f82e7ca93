"""What planning costs: times, and instructions, which other work on the machine does not change.

    python tests/bench/scheduler/plan_cost.py --out tests/bench/results/scheduler.json

Runs the programs of the core, of the wire and of the vote (`router/core/examples/plan_cost`,
`proto/examples/timing.rs`, `router/engine/examples/vote_cost.rs`), the core's main property and the hour of a real
trace. Valgrind's callgrind counts the instructions of plan + advance alone. Says what it has measured as it goes, and
ends with an error where a part takes more than `LIMIT_SECONDS` or a figure with a goal did not come.
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
import threading
import time
import timeit
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import plait_proto
from plait.bench.result_file import Row, commit, machine, versions
from plait.simulate.command import run
from plait.simulate.settings import ClusterSettings, LoadSettings, SimulateSettings

ROOT = Path(__file__).resolve().parents[3]
LIBRARIES = ("plait", "msgspec")
NUM_CORES = len(os.sched_getaffinity(0))
CONTEXTS = (1024, 8192, 131072)
CACHES = ("empty", "full")


def planning(num_decoders: int, context: int, cache: str) -> str:
    """The name of a case."""
    return f"plan + advance, {num_decoders} decoders, context {context}, cache {cache}"


GOALS = {
    **{
        (planning(num_decoders, context, cache), percentile): goal
        for num_decoders, goals in (
            (256, {"p50": 40e-6, "p99": 120e-6}),
            (1024, {"p50": 150e-6}),
            (4096, {"p50": 700e-6}),
        )
        for context in CONTEXTS[1:]
        for cache in CACHES
        for percentile, goal in goals.items()
    },
    ("admit 8192 tokens, pool of 131072 pages, cache full", "p50"): 150e-6,
    ("decision, 64 replicas by function call", "p50"): 5e-6,
    ("decision, 8 engines over ZeroMQ, tcp", "p50"): 120e-6 if NUM_CORES >= 8 else 400e-6,
    ("encode a decode plan of 256 rows", "mean"): 5e-6,
    ("encode a decode plan of 256 rows", "bytes"): 4000.0,
    ("decode a decode plan of 256 rows in Python", "mean"): 50e-6,
    ("property tests", "plans_per_second"): 1e5,
    ("simulate azure_llm_2023_conv, 8 replicas", "duration"): 60.0,
}
"""What the design asks for, the only copy of it: seconds and bytes at most, plans a second at least."""
COUNTED = tuple(
    (num_decoders, context, cache)
    for num_decoders, context in ((4096, 1024), (256, 131072), (1024, 1024), (256, 8192), (256, 1024), (32, 1024))
    for cache in CACHES
)
"""Cases whose instructions are counted, the longest first."""
UNITS = {"bytes": "bytes", "computed_over_distinct": "1"}
"""Of figures that are no times."""
NUM_COUNTED_STEPS = 200
NUM_CASES = 20_000
NUM_DECODES = 10_000
LIMIT_SECONDS = 180.0
BEGUN = time.monotonic()


def row(case: str, metric: str, unit: str, value: float) -> Row:
    """A figure, printed as it comes."""
    said = {"seconds": f"{value * 1e6:,.2f} us", "1": f"{value:.3g}"}.get(unit, f"{value:,.0f} {unit}")
    print(f"[{time.monotonic() - BEGUN:4.0f} s] {case}, {metric}: {said}", file=sys.stderr, flush=True)
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


def built_test() -> str:
    """Builds the core's tests as `make test` does, overflow and assertions checked; the program's path."""
    command = cargo("test", "-p", "plait-core", "--test", "core", "--no-run", "--message-format", "json")
    told = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT).stdout
    (program,) = (path for line in told.splitlines() if (path := json.loads(line).get("executable")) is not None)
    return str(program)


def lines_of(*command: str) -> Iterator[str]:
    """A program's output, line by line."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        limit = threading.Timer(LIMIT_SECONDS, running.kill)
        limit.start()
        try:
            yield from running.stdout
        finally:
            limit.cancel()
    if running.returncode != 0:
        raise SystemExit(f"plan_cost: {' '.join(command)} ended with {running.returncode} ({LIMIT_SECONDS:.0f} s each)")


def timed(program: str) -> Iterator[Row]:
    """Every figure that a program prints, a JSON object a line; times are in microseconds."""
    for figures in map(json.loads, lines_of(program)):
        case = figures.pop("case")
        for metric, value in figures.items():
            if metric in UNITS:
                yield row(case, metric, UNITS[metric], value)
            else:
                yield row(case, metric.removesuffix("_us"), "seconds", seconds(value))


def counted(program: str) -> Iterator[Row]:
    """Instructions of one plan + advance, without what prepares it; a case on each core."""
    with ThreadPoolExecutor(NUM_CORES) as pool:
        for case, value in pool.map(lambda case: (case, num_instructions(program, *case)), COUNTED):
            yield row(planning(*case), "instructions", "instructions", value)


def num_instructions(program: str, num_decoders: int, context: int, cache: str) -> int:
    """Instructions inside `step`, in the mean over a whole run."""
    words = [program, str(num_decoders), str(context), str(NUM_COUNTED_STEPS), cache]
    with tempfile.TemporaryDirectory() as folder:
        valgrind = [
            "valgrind",
            "--tool=callgrind",
            "--toggle-collect=*plan_cost::step",
            f"--callgrind-out-file={folder}/out",
        ]
        command = [*valgrind, *words]
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=LIMIT_SECONDS)
    found = re.search(r"Collected\s*:\s*(\d+)", done.stderr)
    if found is None or found[1] == "0":
        raise RuntimeError(f"callgrind counted nothing: {done.stderr}")
    return round(int(found[1]) / NUM_COUNTED_STEPS)


def decoded_in_python() -> Row:
    """A plan of 256 decode rows, as `proto/examples/timing.rs` encodes it."""
    rows = [word for slot in range(256) for word in (slot, 1000 + slot)]
    pages = [word for slot in range(8) for word in (slot, 10_000 + slot)]
    plan = plait_proto.Plan(
        step=70_000,
        num_prefill=0,
        num_decode=256,
        new_slots=(),
        decision=None,
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


def properties(program: str) -> Row:
    """How many plans the main property checks in a second."""
    os.environ["PLAIT_CASES"] = str(NUM_CASES)
    test = ["properties::speed_of_the_main_property", "--exact", "--ignored", "--nocapture"]
    told = "".join(lines_of(program, *test))
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


def measured(trace: Path) -> Iterator[Row]:
    """Every figure; all is built before the first is taken."""
    program, wire = built("plait-core", "plan_cost"), built("plait-proto", "timing")
    vote, test = built("plait-engine", "vote_cost"), built_test()
    yield from timed(program)
    yield from timed(wire)
    yield decoded_in_python()
    yield from timed(vote)
    yield properties(test)
    yield simulated(trace)
    yield from counted(program)


def check_goals(rows: Iterable[Row]) -> None:
    """Ends the program if a goal names a figure that is not there."""
    missing = GOALS.keys() - {(one.case, one.metric) for one in rows}
    if missing:
        raise SystemExit(f"plan_cost: not measured, though there is a goal for it: {sorted(missing)}")


def main() -> None:
    """Write the results file."""
    parser = argparse.ArgumentParser(description="Measure the scheduler.")
    parser.add_argument("--trace", type=Path, default=ROOT.parent / "shared" / "data" / "azure_llm_2023_conv.csv")
    parser.add_argument("--out", type=Path, required=True)
    typed = parser.parse_args()
    if shutil.which("valgrind") is None:
        raise SystemExit("plan_cost: valgrind is not installed; instructions are the steady measure, so install it")
    if not typed.trace.is_file():
        raise SystemExit(f"plan_cost: there is no {typed.trace}; name the trace with --trace")
    rows = list(measured(typed.trace))
    check_goals(rows)
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
