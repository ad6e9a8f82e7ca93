"""Figures of the scheduler's policies under pressure; exact, so the same on every machine.

python tests/bench/scheduler/policies.py --out tests/bench/results/scheduler-policies.json
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
from plait.bench.result_file import Row, commit, machine, versions

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.scheduler.plan_cost import built, lines_of

GOALS = {
    ("step-time model, first decode-only steps", "steps_until_within_10_percent"): 8.0,
    **{
        (f"step-time model, steps become {factor} times as long", "steps_until_within_10_percent"): 16.0
        for factor in (2, 4, 10)
    },
    ("target 30 ms, 0.5% of the steps three times as long", "prefill_tokens_a_step_over_undisturbed"): 0.95,
    ("target 30 ms, 0.5% of the steps three times as long", "decoding_step_p99"): 0.031,
    ("target 30 ms, 1% of the steps three times as long", "decoding_step_p99_without_hiccups"): 0.031,
    ("target 30 ms, 256 streams, graphs of whole tiles", "decoding_step_p99"): 0.031,
    ("fair share, one tenant fills the queue", "another_is_taken"): 1.0,
    **{
        (f"{num} requests that share {shared} tokens, chunks of {chunk}", "computed_over_distinct"): 1.1
        for num, shared, chunk in ((64, 1024, 8192), (64, 4096, 8192), (4, 32768, 2048), (4, 32768, 512))
    },
    **{
        (f"512 requests of {prompt} + {output} tokens on 2,048 pages", "prefill_over_needed"): 1.5
        for prompt, output in ((128, 1000), (16, 2000))
    },
}
"""Of the issue that these policies come from."""
SECONDS = ("seconds", "mixed_step_mean", "decoding_step_p99", "decoding_step_p99_without_hiccups")


def measured() -> Iterator[Row]:
    for told in map(json.loads, lines_of(built("plait-core", "pressure"))):
        case, metric = told["case"], told["metric"]
        row = Row(case, metric, "seconds" if metric in SECONDS else "1", told["value"], GOALS.get((case, metric)))
        print(f"{row.case}, {row.metric}: {row.value:g} (goal {row.goal})", flush=True)
        yield row


def main() -> None:
    """Write the results file."""
    parser = argparse.ArgumentParser(description="Show the scheduler's policies under pressure.")
    parser.add_argument("--out", type=Path, required=True)
    typed = parser.parse_args()
    rows = list(measured())
    missing = GOALS.keys() - {(row.case, row.metric) for row in rows}
    if missing:
        raise SystemExit(f"policies: not measured, though there is a goal for it: {sorted(missing)}")
    report = {
        "commit": commit(),
        "command": "tests/bench/scheduler/policies.py",
        "machine": machine(),
        "versions": versions(("plait",)),
        "rows": [msgspec.to_builtins(row) for row in rows],
    }
    typed.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
