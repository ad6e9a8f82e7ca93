"""Every acceptance test belongs to one suite, and a suite is recorded whole or not at all."""

from __future__ import annotations

import ast
import json
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from plait.bench.result_file import machine
from plait_testing import budgets, recording

pytest_plugins = ["pytester"]

TESTS = [path for path in budgets.tracked(".py") if path.is_relative_to(budgets.ROOT / "tests")]
PLUGIN = ("-p", "plait_testing.recording")
THREE = """
import pytest

@pytest.mark.acceptance("spine")
def test_spine(): pass

@pytest.mark.acceptance("cpu")
def test_cpu(): pass

def test_of_no_suite(): pass
"""

SLOW = """def test_quick_cpu(): pass

@pytest.mark.slow
@pytest.mark.acceptance("cpu")
"""

FOUR = """
import pytest

@pytest.mark.acceptance("cpu")
@pytest.mark.parametrize("name", ["one", "two"])
def test_right(name, record):
    record(name, "answers", "answers", *((1, 1) if name == "one" else (2,)))

@pytest.mark.acceptance("cpu")
def test_wrong(record):
    record("wrong", "answers", "answers", 0, 1)
    raise AssertionError

@pytest.fixture
def nothing():
    pytest.skip("not here")

@pytest.mark.acceptance("cpu")
def test_missing(nothing): pass
"""


def marks() -> Iterator[tuple[str, ast.expr]]:
    """Each acceptance mark with the test, or the module, that bears it."""
    for path in TESTS:
        for node in ast.walk(ast.parse(path.read_text())):
            for mark in borne_by(node):
                if "mark.acceptance" in ast.unparse(mark):
                    yield f"{path.name}::{getattr(node, 'name', '')}", mark


def borne_by(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark":
        return node.value.elts if isinstance(node.value, ast.List) else [node.value]
    return getattr(node, "decorator_list", [])


def named_suites(mark: ast.expr) -> list[object]:
    return [ast.literal_eval(word) for word in mark.args] if isinstance(mark, ast.Call) else []


@pytest.mark.parametrize(("test", "mark"), [pytest.param(*one, id=one[0]) for one in marks()])
def test_an_acceptance_test_names_one_known_suite(test: str, mark: ast.expr) -> None:
    names = named_suites(mark)
    assert len(names) == 1, f"{test}: @pytest.mark.acceptance names one suite of {list(recording.SUITES)}"
    assert names[0] in recording.SUITES


def test_every_suite_has_tests() -> None:
    assert {name for _, mark in marks() for name in named_suites(mark)} == set(recording.SUITES)


def test_a_suite_runs_its_own_tests_alone(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(THREE)
    ran = pytester.runpytest_inprocess(*PLUGIN, "--suite", "cpu", "-v")
    ran.assert_outcomes(passed=1, deselected=2)
    ran.stdout.fnmatch_lines(["*test_cpu PASSED*"])


@pytest.mark.parametrize(
    ("words", "num_ran"),
    [([], 1), (["--full"], 2), (["--full", "-m", "slow"], 1)],
)
def test_slow_claims_run_at_full_size(words: list[str], num_ran: int, pytester: pytest.Pytester) -> None:
    given = tomllib.loads((budgets.ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["addopts"]
    marks = given[given.index("-m ") :].partition(" -p ")[0]
    pytester.makepyprojecttoml(f'[tool.pytest.ini_options]\naddopts = "{marks}"\nmarkers = ["slow"]\n')
    pytester.makepyfile(THREE.replace("def test_cpu", SLOW + "def test_cpu"))
    ran = pytester.runpytest_inprocess(*PLUGIN, "--suite", "cpu", *words)
    ran.assert_outcomes(passed=num_ran, deselected=4 - num_ran)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--full"], "needs --full and --suite NAME"),
        (["--suite", "cpu"], "needs --full and --suite NAME"),
        (["--suite", "cpu", "--full", "-k", "recall"], "leave out -k or --record"),
        (["--suite", "cpu", "--full", "-m", "slow"], "leave out -m or --record"),
        (["--suite", "cpu", "--full", "--deselect", "a"], "leave out --deselect or --record"),
        (["--suite", "cpu", "--full", "-x"], "leave out -x or --record"),
        (["--suite", "cpu", "--full", "--collect-only"], "leave out --collect-only or --record"),
        (["--suite", "cpu", "--full", "."], "leave out paths or --record"),
        (["--suite", "cpu", "--full", "--part", "parts"], "--record and --part do not go together"),
    ],
)
def test_a_part_of_a_suite_is_not_recorded(pytester: pytest.Pytester, words: list[str], said: str) -> None:
    refused = pytester.runpytest_inprocess(*PLUGIN, "--record", *words)
    assert refused.ret == pytest.ExitCode.USAGE_ERROR
    refused.stderr.fnmatch_lines([f"*{said}*"])


def test_a_run_that_was_interrupted_is_not_recorded(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(recording, "RESULTS", tmp_path)
    words = (*PLUGIN, "--suite", "cpu", "--full", "--record")
    session = pytester.inline_run(*words, plugins=[Interrupts()], no_reraise_ctrlc=True)
    assert session.ret == pytest.ExitCode.INTERRUPTED
    assert not list(tmp_path.iterdir())


Suite = Callable[..., pytest.RunResult]


@pytest.fixture
def suite(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Suite:
    """`suite(*words)` runs a suite of four cases, in a repository of its own, at its full size."""
    monkeypatch.setattr(recording, "RESULTS", pytester.path / "results")
    pytester.makepyfile(FOUR)
    pytester.run("git", "init", "--quiet")
    commit_all(pytester)
    return lambda *words: pytester.runpytest_inprocess(*PLUGIN, "--suite", "cpu", "--full", *words)


def commit_all(pytester: pytest.Pytester) -> None:
    pytester.run("git", "add", "--all", "*.py")
    pytester.run("git", "-c", "user.name=a", "-c", "user.email=a@b", "commit", "--quiet", "--message", "-")


def test_parts_that_hold_every_case_once_are_a_record(suite: Suite, pytester: pytest.Pytester) -> None:
    suite("--part", "parts", "-k", "wrong or missing")
    suite("--part", "parts", "-k", "right")
    assert suite("--join", "parts").ret == pytest.ExitCode.OK
    written = json.loads((pytester.path / "results" / "acceptance-cpu.json").read_text())
    rows = [(row["case"], row["value"], row["goal"]) for row in written["rows"]]
    assert rows == [("one", 1, 1), ("two", 2, None), ("wrong", 0, 1)]
    assert (written["failed"], written["skipped"]) == (1, 1)
    assert len(written["commit"]) == 40
    (run,) = written["runs"]
    assert len(run["cases"]) == 4
    assert run["machine"] == machine()


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ([], "run by no part: *::test_missing, *::test_right?one?, *::test_right?two?, *::test_wrong"),
        (["right", "wrong"], "run by no part: *::test_missing"),
        (["right", "one or wrong or missing"], "run by more than one part: *::test_right?one?"),
    ],
)
def test_parts_that_miss_a_case_or_hold_it_twice_are_refused(
    parts: list[str], said: str, suite: Suite, pytester: pytest.Pytester
) -> None:
    for words in parts:
        suite("--part", "parts", "-k", words)
    refused = suite("--join", "parts")
    assert refused.ret == pytest.ExitCode.USAGE_ERROR
    refused.stderr.fnmatch_lines([f"*no whole suite; {said}"])
    assert not (pytester.path / "results").exists()


def test_parts_of_another_commit_are_refused(suite: Suite, pytester: pytest.Pytester) -> None:
    suite("--part", "parts")
    pytester.makepyfile(test_more="")
    commit_all(pytester)
    refused = suite("--join", "parts")
    assert refused.ret == pytest.ExitCode.USAGE_ERROR
    refused.stderr.fnmatch_lines(["*no whole suite; of another commit than *"])


@pytest.mark.parametrize("flag", ["--part", "--join"])
def test_parts_of_a_tree_that_is_no_commit_are_refused(flag: str, suite: Suite, pytester: pytest.Pytester) -> None:
    (module,) = pytester.path.glob("*.py")
    module.write_text(module.read_text() + "# changed\n")
    refused = suite(flag, "parts")
    assert refused.ret == pytest.ExitCode.USAGE_ERROR
    refused.stderr.fnmatch_lines([f"*{flag} needs a tree that is a commit*"])


def test_what_is_no_part_is_refused(suite: Suite, pytester: pytest.Pytester) -> None:
    pytester.mkdir("parts").joinpath("other.json").write_text("{}")
    refused = suite("--join", "parts")
    assert refused.ret == pytest.ExitCode.USAGE_ERROR
    refused.stderr.fnmatch_lines(["*holds a file that --part did not write*"])


class Interrupts:
    """Ctrl-C while tests are collected."""

    def pytest_collection_modifyitems(self) -> None:
        raise KeyboardInterrupt
