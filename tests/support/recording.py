"""Pytest plugin: the size at which claims run, and the file in which their figures are kept.

`pytest --full --record NAME` runs every claim at the size that its issue asks for and writes
`tests/bench/results/acceptance-NAME.json`; without `--full` the same claims run reduced.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import pytest
from plait.bench.record import machine, versions

RESULTS = Path(__file__).parents[1] / "bench" / "results"
LIBRARIES = ("plait", "torch", "transformers", "openai")


@dataclass(frozen=True, slots=True)
class Row:
    """One figure: metrics are named as in the benchmarks' files, `goal` is what the issue asks for."""

    case: str
    metric: str
    unit: str
    value: float
    goal: float | None


class Record(Protocol):
    """Keeps one figure."""

    def __call__(self, case: str, metric: str, unit: str, value: float, goal: float | None = None) -> None: ...


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("plait")
    group.addoption("--full", action="store_true", help="run every claim at the size its issue asks for")
    group.addoption("--record", metavar="NAME", help="write the figures to acceptance-NAME.json")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--record") and config.getoption("-k"):
        raise pytest.UsageError("--record keeps whole runs: a part would overwrite its file; leave out -k or --record")
    config.stash[ROWS] = []


ROWS = pytest.StashKey[list[Row]]()


@pytest.fixture(scope="session")
def sized(pytestconfig: pytest.Config) -> Callable[[int, int], int]:
    """`sized(reduced, full)`: how many of something this run takes."""
    full = bool(pytestconfig.getoption("--full"))
    return lambda reduced, at_full_size: at_full_size if full else reduced


@pytest.fixture(scope="session")
def record(pytestconfig: pytest.Config) -> Record:
    """Keep a figure for the results file."""
    rows = pytestconfig.stash[ROWS]

    def keep(case: str, metric: str, unit: str, value: float, goal: float | None = None) -> None:
        rows.append(Row(case, metric, unit, value, goal))

    return keep


def pytest_sessionfinish(session: pytest.Session) -> None:
    name = session.config.getoption("--record")
    if name:
        path = RESULTS / f"acceptance-{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(report(session), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def report(session: pytest.Session) -> dict[str, object]:
    """The results file, as other programs read it."""
    return {
        "commit": git("rev-parse", "HEAD") + ("-dirty" if git("status", "--porcelain", "--untracked-files=no") else ""),
        "command": " ".join(["pytest", *sys.argv[1:]]),
        "machine": machine(),
        "versions": versions(LIBRARIES),
        "failed": session.testsfailed,
        "skipped": num_skipped(session),
        "rows": [{field: getattr(row, field) for field in Row.__slots__} for row in session.config.stash[ROWS]],
    }


def num_skipped(session: pytest.Session) -> int:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    return len(reporter.stats.get("skipped", ())) if reporter else 0


def git(*arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], capture_output=True, text=True, check=True, cwd=RESULTS.parent
    ).stdout.strip()
