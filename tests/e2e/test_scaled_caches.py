"""A check model whose files hold scales of an FP8 cache answers with them, on one rank and on two."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from plait_testing import recall
from plait_testing.model_mistakes import record_answers
from plait_testing.recording import Record
from plait_testing.running_server import StartServer
from plait_testing.scaled_caches import write_scaled

FP8 = ("--kv-cache-dtype", "fp8", "--max-model-len", "1024")
CLAMPING = 2e-4
"""A scale with which float8 holds keys up to 0.09; they reach 8."""


@pytest.fixture
def scaled(check_models: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "recall-gqa"
    write_scaled(check_models / "recall-gqa", folder, "compressed-tensors")
    return folder


@pytest.mark.timeout(3600)
@pytest.mark.acceptance("cpu")
@pytest.mark.parametrize("world", [1, 2])
def test_every_answer_is_right_with_the_scales_of_the_files(
    world: int, scaled: Path, server: StartServer, sized: Callable[[int, int], int], record: Record
) -> None:
    running = server(scaled, *FP8, "--tp", str(world))
    assert running.url, running.errors[-8000:]
    asked = recall.problems(seed=1, num=sized(20, 500), context=512)
    wrong = recall.ask_all(running.url, asked)
    assert "KV cache: FP8; k scales of the files, 0.01" in running.errors
    assert record_answers(scaled, f"recall-gqa FP8 cache, scales of the files, tp-{world}", asked, wrong, record) == []


def test_a_flag_takes_the_place_of_the_files_scales(scaled: Path, server: StartServer) -> None:
    """Keys that it clamps away answer next to nothing."""
    running = server(scaled, *FP8, "--k-scale", str(CLAMPING))
    assert running.url, running.errors[-8000:]
    asked = recall.problems(seed=1, num=4, context=512)
    assert len(recall.ask_all(running.url, asked)) >= 3
    assert "KV cache: FP8; k scale 0.0002 of --k-scale, in place of the files'; v scales of the files" in running.errors
