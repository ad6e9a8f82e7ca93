"""Check models in FP8 answer on a GPU as their de-quantised weights do, whatever the steps' sizes."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from plait_testing import gpu_runs, recall
from plait_testing.fp8_models import Form, write_dequantised, write_fp8
from plait_testing.model_mistakes import mistakes_of_the_engine
from plait_testing.recording import Record
from plait_testing.running_server import StartServer

pytestmark = pytest.mark.gpu
MODELS = ("recall-gqa", "recall-mla")
FORMS: tuple[Form, ...] = ("blocks", "channel")
# Activations are rounded to four bits of a fraction as well: a tenth of the answers at most, as for an FP8 cache.
SHARE_WRONG = gpu_runs.SHARE_WRONG_OF_FP8


@pytest.mark.acceptance("gpu-fp8")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", MODELS)
def test_answers_from_fp8_weights_are_right_but_for_a_few(
    name: str,
    form: Form,
    check_models: Path,
    tmp_path: Path,
    server: StartServer,
    sized: Callable[[int, int], int],
    record: Record,
) -> None:
    quantised, widened = tmp_path / "fp8" / name, tmp_path / "widened" / name
    write_fp8(check_models / name, quantised, form)
    write_dequantised(check_models / name, widened, form)
    asked = recall.problems(seed=1, num=sized(40, 400), context=2048)
    asked += recall.problems(seed=2, num=sized(10, 100), context=8192)
    flags = ("--device", "cuda", "--num-pages", f"{gpu_runs.NUM_PAGES}")
    wrong = {}
    for case, folder, more in (
        (f"{name} FP8 {form}", quantised, ()),
        (f"{name} FP8 {form}, widened", widened, ()),
        (f"{name} --quantization fp8", check_models / name, ("--quantization", "fp8")),
    ):
        if "--quantization" in more and form != FORMS[0]:
            continue
        running = server(folder, *flags, *more)
        assert running.url, running.errors[-8000:]
        assert ("with FP8 weights" in running.read_line("model")) == (folder == quantised or bool(more))
        wrong[case] = recall.ask_all(running.url, asked, model=name, concurrency=13)
        record(case, "problems_right", "problems", len(asked) - len(wrong[case]), len(asked))
        running.stop()
    dense = wrong[f"{name} FP8 {form}, widened"]
    own = mistakes_of_the_engine(widened, asked, dense)
    record(f"{name} FP8 {form}, widened", "mistakes_of_the_engine", "problems", len(own), 0)
    assert own == []
    assert all(len(some) <= len(asked) * SHARE_WRONG for some in wrong.values()), wrong
    shutil.rmtree(tmp_path / "fp8")
