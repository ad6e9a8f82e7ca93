"""On a GPU a check model whose layers have different scales of an FP8 cache answers with them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from plait_testing import gpu_runs, recall
from plait_testing.recording import Record
from plait_testing.running_server import StartServer
from plait_testing.scaled_caches import write_scaled

pytestmark = pytest.mark.gpu
FP8 = ("--device", "cuda", "--num-pages", f"{gpu_runs.NUM_PAGES}", "--kv-cache-dtype", "fp8")
CLAMPING = 2e-4
"""A scale with which float8 holds keys up to 0.09; they reach 8."""


@pytest.mark.acceptance("gpu-fp8")
def test_answers_from_a_cache_with_each_layer_s_scales_are_right_but_for_a_few(
    check_models: Path, tmp_path: Path, server: StartServer, sized: Callable[[int, int], int], record: Record
) -> None:
    scaled = tmp_path / "recall-gqa"
    write_scaled(check_models / "recall-gqa", scaled, "compressed-tensors")
    asked = recall.problems(seed=1, num=sized(40, 500), context=2048)
    running = server(scaled, *FP8)
    assert running.url, running.errors[-8000:]
    wrong = recall.ask_all(running.url, asked, concurrency=13)
    assert "KV cache: FP8; k scales of the files, 0.01" in running.errors
    record(
        "recall-gqa FP8 cache, scales of the files", "problems_right", "problems", len(asked) - len(wrong), len(asked)
    )
    assert len(wrong) <= len(asked) * gpu_runs.SHARE_WRONG_OF_FP8, wrong
    running.stop()
    clamped = server(scaled, *FP8, "--k-scale", f"{CLAMPING}")
    assert clamped.url, clamped.errors[-8000:]
    assert len(recall.ask_all(clamped.url, asked[:10])) >= 7
