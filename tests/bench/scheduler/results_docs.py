"""What planning costs, in the results document; all from the results file.

    python tests/bench/scheduler/results_docs.py

Rewrites what stands between the marks `<!-- bench-scheduler -->` and `<!-- /bench-scheduler -->`. A test compares the
document with the file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
from plait.bench.result_file import Row

ROOT = Path(__file__).parents[3]
RESULT = ROOT / "tests/bench/results/scheduler.json"
DOC = ROOT / "tests/bench/results/README.md"
BEGIN, END = "<!-- bench-scheduler -->\n", "<!-- /bench-scheduler -->"
PLANNING = re.compile(r"plan \+ advance, (\d+) decoders, context (\d+), cache (empty|full)")
AT_LEAST = ("plans_per_second",)
"""Metrics of which more is better."""
SPREAD = {"p50": "p99"}
"""The metric that stands in brackets after another."""


class Result(msgspec.Struct, frozen=True):
    """The results file, as far as the document quotes it."""

    commit: str | None
    machine: dict[str, str | int]
    rows: list[Row]

    def row(self, case: str, metric: str) -> Row | None:
        return next((row for row in self.rows if (row.case, row.metric) == (case, metric)), None)

    @property
    def cases(self) -> list[str]:
        """In their order."""
        return list(dict.fromkeys(row.case for row in self.rows))


def figure(value: float) -> str:
    """To three digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def told(row: Row) -> str:
    """A figure with its unit."""
    if row.unit == "1":
        return figure(row.value)
    if row.unit != "seconds":
        return f"{row.value:,.0f} {row.unit}"
    return f"{figure(row.value)} s" if row.value >= 0.01 else f"{figure(row.value * 1e6)} us"


def is_met(row: Row) -> bool:
    return row.goal is None or (row.value >= row.goal if row.metric in AT_LEAST else row.value <= row.goal)


def goals(result: Result) -> str:
    """How many figures that the design asks for are reached, and which are not."""
    asked = [row for row in result.rows if row.goal is not None]
    missed = [f"{row.case}: {row.metric} {told(row)}" for row in asked if not is_met(row)]
    if not missed:
        return f"All {len(asked)} figures that the design asks for are reached."
    return f"{len(asked) - len(missed)} of {len(asked)} figures that the design asks for are reached; not: " + (
        "; ".join(missed) + "."
    )


def table(head: list[str], lines: list[list[str]]) -> list[str]:
    return ["| " + " | ".join(line) + " |" for line in (head, ["---"] * len(head), *lines)]


def bracketed(values: list[str]) -> str:
    """The first, and the others after it in brackets."""
    return " ".join([*values[:1], *(f"({value})" for value in values[1:])])


def planning(result: Result, metrics: tuple[str, ...], unit: str, scale: float) -> list[str]:
    """Plan + advance by number of decoders, context and cache, in `unit`; what is asked for, if anything, is first."""
    found = {case: match.groups() for case in result.cases if (match := PLANNING.fullmatch(case))}
    columns = sorted({(cache, int(context)) for _, context, cache in found.values()})
    head = [f"{context // 1024}k{', cache full' if cache == 'full' else ''}" for cache, context in columns]
    lines = []
    for number in sorted({int(num_decoders) for num_decoders, _, _ in found.values()}):
        cases = [f"plan + advance, {number} decoders, context {context}, cache {cache}" for cache, context in columns]
        rows = [[row for metric in metrics if (row := result.row(case, metric)) is not None] for case in cases]
        asked = max(([row.goal for row in each if row.goal is not None] for each in rows), key=len)
        cells = [asked, *([row.value for row in each] for each in rows)]
        lines.append([f"{number:,}", *(bracketed([figure(value * scale) for value in cell]) for cell in cells)])
    return table([f"decoders, {unit}", "asked for", *head], lines)


def others(result: Result) -> Iterator[list[str]]:
    """Everything else: a line a figure, with what is asked."""
    for row in result.rows:
        if PLANNING.fullmatch(row.case) or row.metric in SPREAD.values():
            continue
        beside = result.row(row.case, SPREAD.get(row.metric, ""))
        asked = "" if row.goal is None else told(msgspec.structs.replace(row, value=row.goal))
        name = "" if row.metric in ("p50", "duration") else f", {row.metric.replace('_', ' ')}"
        yield [row.case + name, bracketed([told(each) for each in (row, beside) if each is not None]), asked]


def section(made: bytes) -> str:
    """What the document says of the results file."""
    result = msgspec.json.decode(made, type=Result)
    about = f"Commit {(result.commit or 'unknown')[:12]}, {result.machine['cores']} cores ({result.machine['cpu']})."
    lines = [
        f"{about} {goals(result)}",
        "",
        "Median of plan + advance by context, with one more plan on the wire, every request decoding, its context "
        "ending anywhere in a page of 64 tokens (in brackets p99):",
        "",
        *planning(result, ("p50", "p99"), "us", 1e6),
        "",
        "Instructions of the same, in thousands, in the mean of 200 steps:",
        "",
        *planning(result, ("instructions",), "thousands", 1e-3),
        "",
        *table(["what, median (p99)", "measured", "asked for"], list(others(result))),
    ]
    return "\n".join(lines) + "\n"


def with_section(text: str, made: bytes) -> str:
    """The text with what stands between its marks replaced; raises `ValueError` if it has not one such place."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return before + BEGIN + section(made) + END + after


def main() -> None:
    DOC.write_text(with_section(DOC.read_text(encoding="utf-8"), RESULT.read_bytes()), encoding="utf-8")
    print(f"bench-scheduler: {DOC.relative_to(ROOT)} says what {RESULT.name} says")


if __name__ == "__main__":
    main()
