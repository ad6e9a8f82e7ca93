"""A suite run in parts, by several processes or on several machines, and its record put together from them.

A part says of what commit it is and which cases it ran. Together the parts must hold every case of the suite exactly
once, all of the commit that puts them together; what failed or was skipped in a part is so in the whole.
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
import pytest


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one process ran of a suite, at its full size."""

    suite: str
    commit: str
    machine: dict[str, object]
    versions: dict[str, str]
    num_cores: int
    """Cores that the process could use."""
    outcomes: dict[str, str]
    """Case (pytest's node id) -> `passed`, `failed` or `skipped`."""
    rows: list[dict[str, str | int | float | None]]


class Outcomes:
    """Pytest plugin: what became of each case."""

    def __init__(self) -> None:
        self.by_case: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A case whose fixtures failed or skipped has no call phase; one whose teardown failed has failed."""
        if report.when == "call" or not report.passed:
            self.by_case[report.nodeid] = report.outcome


def keep(part: Part, folder: Path) -> None:
    """Write a part beside the others. A second run of a case is a second file, so that `load` finds both."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{part.suite}-{uuid.uuid4().hex}.json").write_bytes(msgspec.json.encode(part))


def load(folder: Path, suite: str) -> list[Part]:
    """The parts of a suite in a folder. Raises `UsageError` if a file is not a part."""
    try:
        parts = [msgspec.json.decode(path.read_bytes(), type=Part) for path in sorted(folder.glob("*.json"))]
    except msgspec.DecodeError as error:
        raise pytest.UsageError(f"{folder} holds a file that --part did not write: {error}") from error
    return [part for part in parts if part.suite == suite]


def require_each_case_once(cases: Sequence[str], parts: Iterable[Part], commit: str) -> None:
    """Raise `UsageError` if the parts are not the whole suite at this commit, each case run once."""
    found = Counter(case for part in parts for case in part.outcomes)
    wrong = {
        f"of another commit than {commit}": {part.commit for part in parts} - {commit},
        "run by no part": set(cases) - set(found),
        "not of this suite": set(found) - set(cases),
        "run by more than one part": {case for case, times in found.items() if times > 1},
    }
    said = [f"{what}: {', '.join(sorted(names))}" for what, names in wrong.items() if names]
    if said:
        raise pytest.UsageError("the parts are no whole suite; " + "; ".join(said))


def whole(cases: Sequence[str], parts: Sequence[Part], command: str) -> dict[str, object]:
    """The results file of parts that passed `require_each_case_once`; rows in the order of the suite's cases."""
    ordered = sorted(parts, key=lambda part: min(cases.index(case) for case in part.outcomes))
    outcomes = Counter(outcome for part in parts for outcome in part.outcomes.values())
    return {
        "commit": parts[0].commit,
        "command": command,
        "runs": runs(ordered),
        "failed": outcomes["failed"],
        "skipped": outcomes["skipped"],
        "rows": [row for part in ordered for row in part.rows],
    }


def runs(parts: Iterable[Part]) -> list[dict[str, object]]:
    """Where the cases were run: each machine, its versions and the cores that a part had there, with its cases."""
    grouped: dict[bytes, tuple[Part, list[str]]] = {}
    for part in parts:
        where = msgspec.json.encode((part.machine, part.versions, part.num_cores))
        grouped.setdefault(where, (part, []))[1].extend(part.outcomes)
    return [
        {"machine": one.machine, "versions": one.versions, "cores_of_a_part": one.num_cores, "cases": cases}
        for one, cases in grouped.values()
    ]
