"""The core plans as the rules in plain Python do, call by call."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from plait_testing.recording import Record
from plait_testing.scheduler_cases import built_replay, differences


@pytest.mark.process
@pytest.mark.acceptance("scheduler")
def test_core_and_model_answer_every_call_alike(sized: Callable[[int, int], int], record: Record) -> None:
    num_cases = sized(2_000, 100_000)
    found = list(differences(built_replay(), range(num_cases)))
    record("plain Python model of the rules", "cases_alike", "cases", num_cases - len(found), num_cases)
    assert not found, found[0]
