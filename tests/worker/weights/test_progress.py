"""Loading progress on a terminal and in a log, and none for a fast load."""

from __future__ import annotations

import io
import logging
import re

import pytest
from plait_worker.weights.progress import LoadingProgress
from plait_worker.weights.weight_memory import WeightMemory

GIB = 1 << 30


class Terminal(io.StringIO):
    """Says so."""

    def isatty(self) -> bool:
        return True


class Clock:
    """Goes on by hand."""

    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def load(progress: LoadingProgress, clock: Clock, seconds: float) -> None:
    """Four tensors of a GiB each; one that was not expected takes time too."""
    held = WeightMemory(progress=progress.show)
    held.expect({name: GIB for name in "abcd"}, num_passing=GIB)
    for name in ("a", "copy of a", "b", "c", "d"):
        clock.seconds += seconds
        held.add(name, GIB)


def test_a_terminal_gets_a_bar_that_fills_and_ends_its_line() -> None:
    terminal, clock = Terminal(), Clock()
    load(LoadingProgress(terminal, clock), clock, seconds=1)
    shares = re.findall(r"\rweights \[(#*)(\.*)\] +(\d+)% of 4\.0 GiB", terminal.getvalue())
    assert [(len(full + rest), int(share)) for full, rest, share in shares] == [(30, n) for n in (25, 25, 50, 75, 100)]
    assert len(shares[-1][0]) == 30
    assert terminal.getvalue().endswith("100% of 4.0 GiB\n")
    assert terminal.getvalue().count("\n") == 1


def test_a_log_gets_a_line_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    stream, clock = io.StringIO(), Clock()
    load(LoadingProgress(stream, clock), clock, seconds=3)
    assert [record.getMessage() for record in caplog.records] == [
        "weights: 25% of 4.0 GiB",
        "weights: 75% of 4.0 GiB",
    ]
    assert stream.getvalue() == ""


def test_a_load_that_takes_no_time_shows_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    for stream in (Terminal(), io.StringIO()):
        clock = Clock()
        load(LoadingProgress(stream, clock), clock, seconds=0.03)
        assert stream.getvalue() == ""
    assert not caplog.records
