"""What the front door does with one core, in docs/performance.md; all from the results file.

    python tests/bench/http/speed_docs.py

Rewrites what stands between the marks `<!-- streaming-speed -->` and `<!-- /streaming-speed -->`. A test compares the
page with the file.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.scheduler.results_docs import ROOT, Result, figure, table

RESULT, PAGE = ROOT / "tests/bench/results/streaming-speed.json", ROOT / "docs/performance.md"
BEGIN, END = "<!-- streaming-speed -->\n", "<!-- /streaming-speed -->"
NOT_YET = "No run of it is recorded yet.\n"
AT_MOST = ("added_latency_p99",)
"""Metrics with a goal of which less is better."""
STREAMS = ["load", "tokens/s", "chunks of one token", "chunks a read", "added latency, p50 / p99", "CPU a token, us"]
CHATS = ["load", "requests/s", "CPU a request, us"]


def section(made: bytes | None) -> str:
    """What the page says of the results file; None if there is none yet."""
    if made is None:
        return NOT_YET
    result = msgspec.json.decode(made, type=Result)
    about = f"Commit {(result.commit or 'unknown')[:12]}, {result.machine['cpu']}. CPU is by thread of the process."
    lines = [
        about,
        "",
        *table(STREAMS, list(streams(result))),
        "",
        *table(CHATS, list(chats(result))),
        "",
        *goals(result),
    ]
    return "\n".join(lines) + "\n"


def streams(result: Result) -> Iterator[list[str]]:
    for case in result.cases:
        if result.row(case, "output_tokens_per_second") is not None:
            added = [cell(result, case, f"added_latency_p{percent}", 1e3, 2) for percent in (50, 99)]
            yield [
                case,
                cell(result, case, "output_tokens_per_second"),
                cell(result, case, "chunks_of_one_token", 100, 1) + "%",
                cell(result, case, "chunks_per_read", 1, 2),
                "-" if "-" in added else " / ".join(added) + " ms",
                threads(result, case, "_per_token", 2),
            ]


def chats(result: Result) -> Iterator[list[str]]:
    for case in result.cases:
        if result.row(case, "requests_per_second") is not None:
            yield [case, cell(result, case, "requests_per_second"), threads(result, case, "_per_request", 0)]


def threads(result: Result, case: str, ending: str, digits: int) -> str:
    """All processor time, and by thread where it is not nothing."""
    parts = {
        row.metric.removesuffix(f"_cpu{ending}").removeprefix("plait-"): f"{row.value * 1e6:.{digits}f}"
        for row in result.rows
        if row.case == case and row.metric.endswith(f"_cpu{ending}")
    }
    told = [f"{name} {us}" for name, us in parts.items() if float(us) > 0]
    return cell(result, case, f"cpu{ending}", 1e6, digits) + (f" ({', '.join(told)})" if told else "")


def cell(result: Result, case: str, metric: str, factor: float = 1.0, digits: int = 0) -> str:
    row = result.row(case, metric)
    return "-" if row is None else f"{row.value * factor:,.{digits}f}"


def goals(result: Result) -> Iterator[str]:
    """Each figure that has a goal, and whether it is met."""
    for row in result.rows:
        if row.goal is not None:
            lower = row.metric in AT_MOST
            is_met = row.value <= row.goal if lower else row.value >= row.goal
            words = f"{row.case}: {row.metric.replace('_', ' ')} {figure(row.value)} {row.unit}"
            limit = f"goal at {'most' if lower else 'least'} {row.goal:,g}"
            yield f"- {words}, {limit}: {'met' if is_met else '**missed**'}"


def with_section(text: str, made: bytes | None) -> str:
    """The text with what stands between its marks replaced; raises `ValueError` if it has not one such place."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return before + BEGIN + section(made) + END + after


def recorded() -> bytes | None:
    return RESULT.read_bytes() if RESULT.exists() else None


def main() -> None:
    PAGE.write_text(with_section(PAGE.read_text(encoding="utf-8"), recorded()), encoding="utf-8")
    print(f"streaming-speed: {PAGE.relative_to(ROOT)} says what {RESULT.name} says")


if __name__ == "__main__":
    main()
