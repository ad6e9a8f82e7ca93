"""The fault table's rows say what was measured, and a loss in one of them fails the command."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from bench.faults import fault_table
from bench.faults.fault_rows import Run, row
from bench.faults.streams import losses


def test_a_row_has_percentiles_of_times_and_sums_of_losses() -> None:
    results = [{"recovery_seconds": float(each), "gap_ratio": 1.0, "lost_tokens": each % 2} for each in range(101)]
    assert row(results, fault="a kill") == {
        "fault": "a kill",
        "runs": 101,
        "recovery_seconds_p50": 50.0,
        "recovery_seconds_p99": 99.0,
        "gap_ratio_p50": 1.0,
        "gap_ratio_p99": 1.0,
        "lost_tokens": 50,
    }


@pytest.mark.parametrize(
    ("given", "lost"),
    [
        ([["a", "b"]], (0, 0, 0)),
        ([["a"]], (1, 1, 0)),
        ([["a", "a", "b"]], (1, 0, 1)),
        ([["a", "c"]], (1, 0, 0)),
    ],
    ids=["as it was", "lost", "repeated", "another"],
)
def test_a_stream_counts_by_what_it_has_lost(given: list[list[str]], lost: tuple[int, int, int]) -> None:
    assert tuple(losses(given, [["a", "b"]]).values()) == lost


@pytest.mark.parametrize(("num_lost", "code"), [(0, 0), (1, 1)])
def test_a_lost_token_fails_the_command(
    num_lost: int, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def fault(_: Path) -> Iterator[Run]:
        yield lambda: {"lost_tokens": num_lost}

    monkeypatch.setattr(fault_table, "FAULTS", {"a kill": fault})
    out = tmp_path / "faults.json"
    assert fault_table.main(["--runs", "3", "--out", str(out), "--note", "other work beside it"]) == code
    record = json.loads(out.read_text())
    assert record["rows"] == [{"fault": "a kill", "runs": 3, "lost_tokens": 3 * num_lost}]
    assert record["note"] == "other work beside it"
