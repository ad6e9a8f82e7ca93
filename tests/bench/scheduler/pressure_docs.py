"""The scheduler under pressure, before and after: tables of `tests/bench/results/README.md` from its results files.

    python tests/bench/scheduler/pressure_docs.py

Replaces what stands between `<!-- scheduler-pressure -->` and `<!-- /scheduler-pressure -->`. A test compares the
document with the files.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import msgspec

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.scheduler.results_docs import DOC, ROOT, Result, figure, table

RESULTS = ROOT / "tests/bench/results"
BEGIN, END = "<!-- scheduler-pressure -->\n", "<!-- /scheduler-pressure -->"
AT_LEAST = ("prefill_tokens_a_step_over_undisturbed", "another_is_taken")
"""Metrics of which more is better."""
SIMULATED = re.compile(r"(\S+) @ (\d+)%, ([^,]+)")
LOADS = ("90", "100", "110")
"""Loads that the results document shows, in percent of saturation; the files hold more."""


class Pair(msgspec.Struct, frozen=True):
    """The same measurement before and after."""

    before: Result
    after: Result

    def values(self, case: str, metric: str) -> tuple[str, str]:
        rows = (self.before.row(case, metric), self.after.row(case, metric))
        before, after = ("" if row is None else told(row.value, row.unit) for row in rows)
        return before, after

    def cell(self, case: str, metric: str) -> str:
        before, after = self.values(case, metric)
        return f"{before or '-'} / {after or '-'}"


def read(name: str) -> Pair:
    files = (RESULTS / f"{name}-before.json", RESULTS / f"{name}.json")
    before, after = (msgspec.json.decode(file.read_bytes(), type=Result) for file in files)
    return Pair(before, after)


def told(value: float, unit: str) -> str:
    """Times in milliseconds."""
    return figure(value * 1e3) if unit == "seconds" else figure(value)


def policies(pair: Pair) -> list[str]:
    lines = []
    for row in pair.after.rows:
        before, after = pair.values(row.case, row.metric)
        goal = ""
        if row.goal is not None:
            goal = ("at least " if row.metric in AT_LEAST else "at most ") + told(row.goal, row.unit)
        unit = ", ms" if row.unit == "seconds" else ""
        lines.append([row.case, row.metric.replace("seconds", "time").replace("_", " ") + unit, before, after, goal])
    return table(["load", "figure", "before", "after", "goal"], lines)


def simulated(pair: Pair) -> list[str]:
    metrics = ("ttft_p50", "ttft_p99", "itl_p99", "itl_max", "output_tokens_per_second", "prefix_hit_ratio")
    lines = []
    for case in pair.after.cases:
        match = SIMULATED.fullmatch(case)
        if match is not None and match[2] in LOADS:
            lines.append([match[1], f"{match[2]}%", match[3], *(pair.cell(case, metric) for metric in metrics)])
    names = ("TTFT p50", "p99", "ITL p99", "max", "tokens/s", "prefix hits")
    return table(["simulated load", "of saturation", "setting", *names], lines)


def tenants(pair: Pair) -> list[str]:
    """What each tenant got, and how far from max-min fairness."""
    lines = []
    for case in pair.after.cases:
        match = re.fullmatch(r"(\S+ @ (\d+)%, [^,]+), ((?:tenant|worst).*)", case)
        if match is not None and match[2] == "110":
            metrics = ("ttft_p50", "ttft_p99", "ttft_max", "itl_p99", "itl_max", "num_refused")
            shares = (pair.cell(match[1], f"{name}_share_of_fair") for name in ("least", "greatest"))
            lines.append([match[1], match[3], *(pair.cell(case, metric) for metric in metrics), *shares])
    names = ("TTFT p50", "p99", "max", "ITL p99", "max", "refused", "least share of fair", "greatest")
    return table(["simulated load", "tenant", *names], lines)


def overload(pair: Pair) -> list[str]:
    metrics = (
        "goodput",
        "goodput_over_peak",
        "goodput_over_peak_by_worker_cpu",
        "worker_busy_share",
        "accepted_ttft_p50",
        "accepted_ttft_p99",
        "share_accepted",
        "retry_after_p50",
        "share_of_true_retry_after",
        "cpu_share_of_others",
    )
    cases = [case for case in pair.after.cases if pair.after.row(case, "goodput") is not None]
    lines = [[case, *(pair.cell(case, metric) for metric in metrics)] for case in cases]
    names = (
        "tokens/s",
        "over the peak",
        "the same a CPU second of the worker",
        "worker busy",
        "accepted TTFT p50",
        "p99",
        "share accepted",
        "Retry-After p50",
        "share of true ones",
        "others' share of the CPU",
    )
    return table(["offered over HTTP", *names], lines)


def section(exact: Pair, simulation: Pair, http: Pair) -> str:
    """What the document says of the files."""
    after = [(pair.after.commit or "unknown")[:12] for pair in (exact, simulation, http)]
    lines = [
        f"Before: commit {(exact.before.commit or 'unknown')[:12]}; after: {after[0]}, simulations {after[1]}, over "
        f"HTTP {after[2]}. Times in ms. Cells with a slash are before / after.",
        "",
        "Exact figures, the same on every machine:",
        "",
        *policies(exact),
        "",
        "One simulated replica of Qwen3-8B on an H200 (`plait simulate`), at shares of the saturation before:",
        "",
        *simulated(simulation),
        "",
        "By tenant, at 110% of that. A share of 1 is max-min fairness:",
        "",
        *tenants(simulation),
        "",
        "recall-gqa on a CPU with one thread, 8 slots and a queue of 32. The peak is what 8 clients get that ask again "
        "as soon as they are answered. They arrive at multiples of that rate. A Retry-After is true if it is within "
        "a factor of 2, or a second, of what requests accepted beside it waited. Before and after took turns on a "
        "machine of two cores that other programs used too: the last column is their share of the CPU time. Tokens for "
        "a second of the worker's CPU time depend least on them:",
        "",
        *overload(http),
    ]
    return "\n".join(lines) + "\n"


def with_section(text: str) -> str:
    """The text with what stands between its marks replaced; raises `ValueError` if it has not one such place."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    made = section(read("scheduler-policies"), read("simulate-pressure"), read("overload"))
    return before + BEGIN + made + END + after


def main() -> None:
    DOC.write_text(with_section(DOC.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"pressure: {DOC.relative_to(ROOT)} says what the results files say")


if __name__ == "__main__":
    main()
