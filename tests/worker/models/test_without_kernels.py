"""Without compiled CPU kernels torch computes the same, and the log says so."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
from plait_kernels import backends
from plait_kernels.cpu import library
from plait_worker.torch_threads import limit_torch_threads

IDS = [3, 1, 4, 1, 5, 9, 2, 6, 53, 58, 17]


@pytest.mark.parametrize(
    ("family", "left"),
    [("llama", "attention"), ("qwen3_moe", "attention, experts"), ("deepseek_v3", "attention, experts")],
)
def test_torch_computes_what_transformers_computes(
    family: str,
    left: str,
    save_tiny: Callable[..., Any],
    drive: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(library, "open_library", lambda: None)
    for ops in backends.TABLE.values():
        for op in ops.values():
            monkeypatch.setattr(op, "_chosen", {})  # decisions that were made with the library
    saved = save_tiny(family)
    driver = drive(saved.path)
    assert (driver.step({"a": IDS})["a"] - saved.logprobs(IDS)).abs().max() < 1e-4
    with caplog.at_level(logging.INFO):
        limit_torch_threads(driver.model, driver.attention)
    assert f"left to torch: GEMMs in float32, {left}, on 1 threads" in caplog.messages
