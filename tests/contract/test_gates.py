"""Every acceptance test belongs to one gate, and a gate is recorded whole or not at all."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import measure
import pytest
import recording

pytest_plugins = ["pytester"]

TESTS = [path for path in measure.tracked(".py") if path.is_relative_to(measure.ROOT / "tests")]
THREE = """
import pytest

@pytest.mark.acceptance("spine")
def test_spine(): pass

@pytest.mark.acceptance("cpu")
def test_cpu(): pass

def test_of_no_gate(): pass
"""


def marks() -> Iterator[tuple[str, ast.expr]]:
    """Each acceptance mark with the test that bears it."""
    for path in TESTS:
        for node in ast.walk(ast.parse(path.read_text())):
            for mark in getattr(node, "decorator_list", ()):
                if "mark.acceptance" in ast.unparse(mark):
                    yield f"{path.name}::{getattr(node, 'name', '')}", mark


def named_gates(mark: ast.expr) -> list[object]:
    return [ast.literal_eval(word) for word in mark.args] if isinstance(mark, ast.Call) else []


@pytest.mark.parametrize(("test", "mark"), [pytest.param(*one, id=one[0]) for one in marks()])
def test_an_acceptance_test_names_one_known_gate(test: str, mark: ast.expr) -> None:
    names = named_gates(mark)
    assert len(names) == 1, f"{test}: @pytest.mark.acceptance names one gate of {list(recording.GATES)}"
    assert names[0] in recording.GATES


def test_every_gate_has_tests() -> None:
    assert {name for _, mark in marks() for name in named_gates(mark)} == set(recording.GATES)


def test_a_gate_runs_its_own_tests_alone(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(THREE)
    ran = pytester.runpytest_inprocess("-p", "recording", "--gate", "cpu", "-v")
    ran.assert_outcomes(passed=1, deselected=2)
    ran.stdout.fnmatch_lines(["*test_cpu PASSED*"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--full"], "needs --full and --gate NAME"),
        (["--gate", "cpu"], "needs --full and --gate NAME"),
        (["--gate", "cpu", "--full", "-k", "recall"], "leave out -k or --record"),
        (["--gate", "cpu", "--full", "--deselect", "a"], "leave out --deselect or --record"),
        (["--gate", "cpu", "--full", "-x"], "leave out -x or --record"),
        (["--gate", "cpu", "--full", "--collect-only"], "leave out --collect-only or --record"),
        (["--gate", "cpu", "--full", "."], "leave out paths or --record"),
    ],
)
def test_a_part_of_a_gate_is_not_recorded(pytester: pytest.Pytester, words: list[str], said: str) -> None:
    refused = pytester.runpytest_inprocess("-p", "recording", "--record", *words)
    assert refused.ret == pytest.ExitCode.USAGE_ERROR
    refused.stderr.fnmatch_lines([f"*{said}*"])


def test_a_run_that_was_interrupted_is_not_recorded(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(recording, "RESULTS", tmp_path)
    words = ("-p", "recording", "--gate", "cpu", "--full", "--record")
    session = pytester.inline_run(*words, plugins=[Interrupts()], no_reraise_ctrlc=True)
    assert session.ret == pytest.ExitCode.INTERRUPTED
    assert not list(tmp_path.iterdir())


class Interrupts:
    """Ctrl-C while tests are collected."""

    def pytest_collection_modifyitems(self) -> None:
        raise KeyboardInterrupt
