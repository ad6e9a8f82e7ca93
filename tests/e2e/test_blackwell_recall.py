"""Every answer is right through the calls of the Blackwell backends. Real servers run on a CPU, with flashinfer's own
checks and a stand-in for its kernels. The kernels themselves were never run.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from plait_testing import recall
from plait_testing.metrics import read_metrics
from plait_testing.recording import Record
from plait_testing.running_server import StartServer

TESTS = Path(__file__).parent.parent
FLAGS = (
    *("--device", "cpu", "--dtype", "bfloat16", "--page-size", "32", "--num-pages", "1024"),
    *("--max-batch-tokens", "2048"),
)
FP8 = (
    "--kv-cache-dtype",
    "fp8",
    "--k-scale",
    "0.37",
    "--long-prefill-token-threshold",
    "256",
    "--mla-context-chunk-size",
    "192",
)
# Model, backend, flags, and the calls that must have been made.
CASES = [
    (
        "recall-mla",
        "trtllm_mla",
        ("--long-prefill-token-threshold", "256", "--mla-context-chunk-size", "192"),
        ("decompressed causal", "decompressed context", "mla decode"),
    ),
    ("recall-mla", "trtllm_mla", ("--no-mixed", *FP8), ("decompressed causal", "decompressed context", "mla decode")),
    ("recall-gqa", "trtllm_mha", ("--long-prefill-token-threshold", "256"), ("mha context", "mha decode")),
]


@pytest.fixture
def blackwell(flashinfer_there: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers of servers started from here take their CPU for a B200."""
    paths = [str(TESTS / "plait_testing" / "blackwell"), str(TESTS), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))


@pytest.mark.acceptance("blackwell")
@pytest.mark.parametrize(("model", "backend", "flags", "calls"), CASES)
def test_every_answer_is_right(
    model: str,
    backend: str,
    flags: tuple[str, ...],
    calls: tuple[str, ...],
    blackwell: None,
    check_models: Path,
    server: StartServer,
    sized: Callable[[int, int], int],
    record: Record,
) -> None:
    asked = recall.problems(seed=1, num=sized(5, 40), context=sized(768, 2048))
    asked += recall.problems(seed=2, num=sized(0, 4), context=8192)
    running = server(check_models / model, *FLAGS, *flags, "--attention-backend", backend)
    wrong = recall.ask_all(running.url, asked, model=model)
    metrics = read_metrics(running.url)
    case = " ".join([model, backend, *(flag for flag in ("--no-mixed", "fp8") if flag in flags)])
    record(f"{case}, stand-in", "problems_right", "problems", len(asked) - len(wrong), len(asked))
    # FP8 rounds keys, values and queries to four bits: a tenth of the answers may be wrong.
    assert len(wrong) <= (len(asked) // 10 if "fp8" in flags else 0), wrong
    assert (metrics['plait_steps_total{kind="mixed"}'] == 0) == ("--no-mixed" in flags)
    running.stop()
    called = next(line for line in running.errors.splitlines() if "stand-in calls:" in line)
    assert [name for name in calls if name not in called] == []


def test_a_page_size_that_the_kernels_do_not_take_ends_the_start(
    blackwell: None, check_models: Path, server: StartServer
) -> None:
    flags = ("--device", "cpu", "--dtype", "bfloat16", "--page-size", "128", "--attention-backend", "trtllm_mla")
    ended = server(check_models / "recall-mla", *flags)
    assert ended.wait() == 3
    assert "pages of 32 or 64 tokens, not 128; set --page-size 64" in ended.last_line
