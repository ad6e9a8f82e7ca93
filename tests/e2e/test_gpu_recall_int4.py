"""Check models in 4 bits answer on a GPU as their de-quantised weights do, whatever the steps' sizes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from plait_testing import gpu_runs, recall
from plait_testing.model_mistakes import mistakes_of_the_engine
from plait_testing.packed_models import FORMS, dense_twin, write_packed
from plait_testing.recording import Record
from plait_testing.running_server import StartServer

pytestmark = pytest.mark.gpu
CASES = (
    ("recall-gqa", "awq", 64),
    ("recall-gqa", "gptq-act-order", 64),
    ("recall-gqa", "mxfp4", 32),
    ("recall-mla", "compressed-zeros", 64),
    ("recall-gqa", "nvfp4", 16),
)
KINDS = {"mxfp4": "MXFP4", "nvfp4": "FP8"}
"""Of the weights as they are held; all others: INT4."""
MOST_APART = 0.01
"""Of the answers: rounding of the weights to bfloat16, which the twin has and 4 bits have not, may turn a few."""
MOST_APART_IN_FP8 = gpu_runs.SHARE_WRONG_OF_FP8
"""The same where NVFP4 is upcast to FP8: activations are rounded as well."""


@pytest.mark.acceptance("gpu-int4")
@pytest.mark.parametrize(("name", "form", "group_size"), CASES)
def test_answers_from_4_bit_weights_are_those_of_the_dequantised_model(
    name: str,
    form: str,
    group_size: int,
    check_models: Path,
    tmp_path: Path,
    server: StartServer,
    sized: Callable[[int, int], int],
    record: Record,
) -> None:
    folder = tmp_path / form / name
    write_packed(check_models / name, folder, FORMS[form], group_size)
    asked = recall.problems(seed=1, num=sized(40, 400), context=2048)
    asked += recall.problems(seed=2, num=sized(10, 100), context=8192)
    wrong, kind = {}, KINDS.get(form, "INT4")
    for case, model in ((f"{name} {form}", folder), (f"{name} {form}, de-quantised", dense_twin(folder))):
        running = server(model, "--device", "cuda", "--num-pages", f"{gpu_runs.NUM_PAGES}")
        assert running.url, running.errors[-8000:]
        assert (f"with {kind} weights" in running.read_line("model")) == (model == folder)
        wrong[case] = recall.ask_all(running.url, asked, model=model.name, concurrency=13)
        record(case, "problems_right", "problems", len(asked) - len(wrong[case]), len(asked))
        running.stop()
    ours, theirs = wrong.values()
    own = mistakes_of_the_engine(dense_twin(folder), asked, theirs)
    record(f"{name} {form}, de-quantised", "mistakes_of_the_engine", "problems", len(own), 0)
    assert own == []
    most_apart = MOST_APART_IN_FP8 if kind == "FP8" else MOST_APART
    assert abs(len(ours) - len(theirs)) <= max(1, len(asked) * most_apart), wrong
