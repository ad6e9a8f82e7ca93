"""Check models in packed integers answer on a CPU as their de-quantised weights do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from plait_testing import recall
from plait_testing.model_mistakes import mistakes_of_the_engine
from plait_testing.packed_models import FORMS, dense_twin, write_packed
from plait_testing.recording import Record
from plait_testing.running_server import StartServer

CASES = (("recall-gqa", "awq"), ("recall-mla", "compressed-zeros"))
MOST_APART = 0.02
"""Of the answers: blocks are multiplied by activations of 8 or 16 bits."""


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.acceptance("cpu")
@pytest.mark.parametrize(("name", "form"), CASES)
def test_answers_from_packed_weights_are_those_of_the_dequantised_model(
    name: str,
    form: str,
    check_models: Path,
    tmp_path: Path,
    server: StartServer,
    sized: Callable[[int, int], int],
    record: Record,
) -> None:
    folder = tmp_path / form / name
    write_packed(check_models / name, folder, FORMS[form], 64)
    asked, wrong = recall.problems(seed=1, num=sized(20, 500), context=512), {}
    for case, model in ((f"{name} {form}", folder), (f"{name} {form}, de-quantised", dense_twin(folder))):
        running = server(model, "--max-model-len", "1024")
        assert running.url, running.errors[-8000:]
        wrong[case] = recall.ask_all(running.url, asked, model=model.name)
        record(case, "problems_right", "problems", len(asked) - len(wrong[case]), len(asked))
        running.stop()
    ours, theirs = wrong.values()
    own = mistakes_of_the_engine(dense_twin(folder), asked, theirs)
    record(f"{name} {form}, de-quantised", "mistakes_of_the_engine", "problems", len(own), 0)
    assert own == []
    assert abs(len(ours) - len(theirs)) <= max(1, len(asked) * MOST_APART), wrong
