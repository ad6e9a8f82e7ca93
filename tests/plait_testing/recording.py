"""Pytest plugin: the size at which claims run, and the file in which their figures are kept.

`pytest --suite NAME --full --record` runs the claims of one suite at the size that its issue asks for and writes
`tests/bench/results/acceptance-NAME.json`; without `--full` the same claims run reduced. The same file comes from
`--part DIR` on any of the suite's cases, until all were run, and then `--join DIR` (`acceptance_parts.py`).
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import pytest
from plait.bench.result_file import machine, versions

from plait_testing import acceptance_parts

RESULTS = Path(__file__).parents[1] / "bench" / "results"
SUITES = {
    "spine": "one rank and its scheduler: recall-gqa, transformers' tokens, texts, many streams",
    "cpu": "recall-mla, every model on several ranks, and bfloat16 and quantised weights against float32",
    "deepseek-v4": "DeepSeek-V4 on a CPU: transformers' log-probabilities and tokens in every chunk, mix and setting",
    "scheduler": "the prefix cache",
    "gpu": "one H200: kernels against float64, models against float32, recall-gqa in every mode and under stress",
    "gpu-mla": "one H200: latent attention against float64 and float32, recall-mla in every mode and under stress",
    "gpu-fp8": "one H200: recall-gqa and recall-mla from FP8 weights, beside the same weights widened",
    "gpu-int4": "one H100 or H200: GEMMs and experts with 4-bit weights against float64",
    "gpu-ranks": "two H200s: recall-gqa and recall-mla on two ranks in every mode and under stress",
    "faults": "recall-gqa and recall-mla while a worker is killed every 20 s",
    "cluster": "the chart on a real control plane: its pods, groups of pods, upgrades, drains, scaling",
    "image": "the images: size, time to ready, a read-only root, nothing secret; compose file and unit",
    "blackwell": "the calls of the Blackwell backends, with a stand-in for their kernels",
}
"""The names that `@pytest.mark.acceptance(NAME)` takes."""
PARTS = {
    "keyword": "-k",
    "markexpr": "-m",
    "deselect": "--deselect",
    "ignore": "--ignore",
    "ignore_glob": "--ignore-glob",
    "lf": "--lf",
    "maxfail": "-x",
    "collectonly": "--collect-only",
}
"""Options that leave claims out."""
NOT_SLOW = "not slow"
"""The `-m` that pyproject.toml gives: of a suite at full size it would leave out the slow claims."""
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
    group.addoption("--suite", choices=SUITES, help="run the claims of one suite, and nothing else")
    kept = group.addoption
    kept("--record", action="store_true", help="run the suite whole and write the figures to acceptance-SUITE.json")
    kept("--part", type=Path, metavar="DIR", help="keep what this run finds in DIR, as a part of its suite")
    kept("--join", type=Path, metavar="DIR", help="run nothing: write acceptance-SUITE.json from the parts in DIR")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--full") and config.getoption("--suite") and config.option.markexpr == NOT_SLOW:
        config.option.markexpr = ""
    recorded = [flag for flag in ("--record", "--join", "--part") if config.getoption(flag)]
    if recorded:
        require_full_suite(config, recorded)
    if recorded in (["--record"], ["--join"]):
        require_whole_run(config, recorded[0])
    config.stash[ROWS] = []
    config.stash[OUTCOMES] = acceptance_parts.Outcomes()
    config.pluginmanager.register(config.stash[OUTCOMES])


def require_full_suite(config: pytest.Config, recorded: list[str]) -> None:
    """Raise `UsageError` unless one process records one suite, at full size, in one of the three ways."""
    if config.getoption("numprocesses", None):
        raise pytest.UsageError(f"{recorded[0]} keeps the figures of one process; leave out -n")
    if len(recorded) > 1:
        raise pytest.UsageError(f"{' and '.join(recorded)} do not go together")
    if not (config.getoption("--suite") and config.getoption("--full")):
        raise pytest.UsageError(f"{recorded[0]} needs --full and --suite NAME, of: {', '.join(SUITES)}")
    if recorded != ["--record"] and commit().endswith(DIRTY):
        raise pytest.UsageError(f"{recorded[0]} needs a tree that is a commit: what differs from it, commit or undo")


def require_whole_run(config: pytest.Config, recorded: str) -> None:
    """Raise `UsageError` if cases of the suite are left out."""
    given = [flag for name, flag in PARTS.items() if config.getoption(name, None)]
    given += ["paths"] if config.args_source is pytest.Config.ArgsSource.ARGS else []
    if given:
        raise pytest.UsageError(
            f"{recorded} keeps whole suites: a part would overwrite their file; "
            f"leave out {', '.join(given)} or {recorded}"
        )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    suite = config.getoption("--suite")
    if suite is None:
        return
    others = [item for item in items if suite not in suites_of(item)]
    config.hook.pytest_deselected(items=others)
    items[:] = [item for item in items if suite in suites_of(item)]


def suites_of(item: pytest.Item) -> list[str]:
    """The suites that a test's marks name."""
    return [name for mark in item.iter_markers("acceptance") for name in mark.args]


def pytest_runtestloop(session: pytest.Session) -> object:
    """With `--join` nothing is run: the parts must hold the collected cases."""
    folder, suite = session.config.getoption("--join"), session.config.getoption("--suite")
    if folder is None:
        return None
    cases = [item.nodeid for item in session.items]
    parts = acceptance_parts.load(folder, suite)
    acceptance_parts.require_each_case_once(cases, parts, commit())
    write_record(suite, acceptance_parts.whole(cases, parts, command()))
    return True


ROWS = pytest.StashKey[list[Row]]()
OUTCOMES = pytest.StashKey[acceptance_parts.Outcomes]()
DIRTY = "-dirty"


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
    config = session.config
    if exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        return
    if config.getoption("--record"):
        write_record(config.getoption("--suite"), report(session))
    if folder := config.getoption("--part"):
        acceptance_parts.keep(part(config), folder)


def write_record(suite: str, found: dict[str, object]) -> None:
    path = RESULTS / f"acceptance-{suite}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def report(session: pytest.Session) -> dict[str, object]:
    """The results file, as other programs read it."""
    return {
        "commit": commit(),
        "command": command(),
        "machine": machine(),
        "versions": versions(LIBRARIES),
        "failed": session.testsfailed,
        "skipped": num_skipped(session),
        "rows": [dataclasses.asdict(row) for row in session.config.stash[ROWS]],
    }


def part(config: pytest.Config) -> acceptance_parts.Part:
    """What this run found of its suite."""
    return acceptance_parts.Part(
        suite=config.getoption("--suite"),
        commit=commit(),
        machine=machine(),
        versions=versions(LIBRARIES),
        num_cores=len(os.sched_getaffinity(0)),
        outcomes=config.stash[OUTCOMES].by_case,
        rows=[dataclasses.asdict(row) for row in config.stash[ROWS]],
    )


def num_skipped(session: pytest.Session) -> int:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    return len(reporter.stats.get("skipped", ())) if reporter else 0


def command() -> str:
    return " ".join(["pytest", *sys.argv[1:]])


def commit() -> str:
    """The commit of the tree, marked if tracked files other than results differ from it."""
    changed = git("status", "--porcelain", "--untracked-files=no", "--", ":/", f":(exclude){RESULTS.name}")
    return git("rev-parse", "HEAD") + (DIRTY if changed else "")


def git(*arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], capture_output=True, text=True, check=True, cwd=RESULTS.parent
    ).stdout.strip()
