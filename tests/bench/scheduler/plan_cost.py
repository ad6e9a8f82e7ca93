"""What planning costs: times, and instructions, which other work on the machine does not change.

    python tests/bench/scheduler/plan_cost.py --out tests/bench/results/scheduler.json

Runs the core's own program (`router/core/examples/plan_cost.rs`); instructions are counted by valgrind, where it is
installed, over the difference of two runs, so that loading the prompts does not count.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path

BUILD = ["cargo", "build", "--release", "--locked", "-p", "plait-core", "--example", "plan_cost"]
COUNTED = ((32, 1024), (256, 1024), (256, 8192), (1024, 1024))
NUM_STEPS = (100, 300)
GOALS = {
    "plan + advance, 256 decoders, context 8192": (40.0, 120.0),
    "plan + advance, 256 decoders, context 131072": (40.0, 120.0),
    "plan + advance, 1024 decoders, context 8192": (150.0, None),
    "plan + advance, 4096 decoders, context 2048": (700.0, None),
    "admit 8192 tokens, pool of 131072 pages, cache full": (150.0, None),
}
"""Microseconds that the design page asks for: p50 and p99."""


@dataclass(frozen=True, slots=True)
class Row:
    """One figure, as in the other results."""

    case: str
    metric: str
    unit: str
    value: float
    goal: float | None


def timed(program: str) -> list[Row]:
    """Microseconds of every case."""
    told = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    rows = []
    for case in map(json.loads, told.splitlines()):
        goals = GOALS.get(case["case"], (None, None))
        for metric, goal in zip(("p50_us", "p99_us"), goals, strict=True):
            rows.append(Row(case["case"], metric.removesuffix("_us"), "us", case[metric], goal))
    return rows


def counted(program: str) -> list[Row]:
    """Instructions of one plan + advance."""
    rows = []
    for num_decoders, context in COUNTED:
        few, many = (num_instructions(program, num_decoders, context, num_steps) for num_steps in NUM_STEPS)
        value = (many - few) / (NUM_STEPS[1] - NUM_STEPS[0])
        case = f"plan + advance, {num_decoders} decoders, context {context}"
        rows.append(Row(case, "instructions", "instructions", round(value), None))
    return rows


def num_instructions(program: str, num_decoders: int, context: int, num_steps: int) -> int:
    """Instructions of a whole run."""
    words = ["valgrind", "--tool=cachegrind", "--cache-sim=no", "--cachegrind-out-file=/dev/null", program]
    run = subprocess.run([*words, *map(str, (num_decoders, context, num_steps))], capture_output=True, text=True)
    found = re.search(r"I\s+refs:\s+([\d,]+)", run.stderr)
    if found is None:
        raise RuntimeError(f"valgrind counted nothing: {run.stderr}")
    return int(found[1].replace(",", ""))


def main() -> None:
    """Write the results file."""
    parser = argparse.ArgumentParser(description="Measure the scheduler.")
    parser.add_argument("--out", type=Path, required=True)
    out: Path = parser.parse_args().out
    subprocess.run(BUILD, check=True)
    program = str(Path(os.environ.get("CARGO_TARGET_DIR", "target")) / "release" / "examples" / "plan_cost")
    rows = timed(program) + (counted(program) if shutil.which("valgrind") else [])
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    report = {
        "commit": commit,
        "command": "tests/bench/scheduler/plan_cost.py",
        "machine": {"cpu": platform.machine(), "cores": os.cpu_count(), "load": os.getloadavg()[0]},
        "rows": [asdict(row) for row in rows],
    }
    out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
