"""Pytest plugin: the size at which claims run, and the file in which their figures are kept.

`pytest --gate NAME --full --record` runs the claims of one gate at the size that its issue asks for and writes
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
GATES = {
    "spine": "one rank and its scheduler: recall-gqa, transformers' tokens, bfloat16, texts, many streams",
    "cpu": "recall-mla, and every model on several ranks",
    "scheduler": "the prefix cache",
    "gpu": "one H200: kernels against float64, models against float32, recall-gqa in every mode and under stress",
    "blackwell": "the calls of the Blackwell backends, with a stand-in for their kernels",
}
"""What `@pytest.mark.acceptance(NAME)` may name; each is an issue's."""
PARTS = {
    "keyword": "-k",
    "deselect": "--deselect",
    "ignore": "--ignore",
    "ignore_glob": "--ignore-glob",
    "lf": "--lf",
    "maxfail": "-x",
    "collectonly": "--collect-only",
}
"""Options that leave claims out."""
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
    group.addoption("--gate", choices=GATES, help="run the claims of one gate, and nothing else")
    group.addoption("--record", action="store_true", help="write the figures to acceptance-GATE.json")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--record"):
        require_whole_run(config)
    config.stash[ROWS] = []


def require_whole_run(config: pytest.Config) -> None:
    """Raise `UsageError` where a recorded run would be less than a gate at its full size."""
    if not (config.getoption("--gate") and config.getoption("--full")):
        raise pytest.UsageError(f"--record needs --full and --gate NAME, of: {', '.join(GATES)}")
    given = [flag for name, flag in PARTS.items() if config.getoption(name, None)]
    given += ["paths"] if config.args_source is pytest.Config.ArgsSource.ARGS else []
    if given:
        raise pytest.UsageError(
            f"--record keeps whole gates: a part would overwrite its file; leave out {', '.join(given)} or --record"
        )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    gate = config.getoption("--gate")
    if gate is None:
        return
    others = [item for item in items if gate not in gates_of(item)]
    config.hook.pytest_deselected(items=others)
    items[:] = [item for item in items if gate in gates_of(item)]


def gates_of(item: pytest.Item) -> list[str]:
    """The gates that a test's marks name."""
    return [name for mark in item.iter_markers("acceptance") for name in mark.args]


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


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    is_whole = exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
    if session.config.getoption("--record") and is_whole:
        path = RESULTS / f"acceptance-{session.config.getoption('--gate')}.json"
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
