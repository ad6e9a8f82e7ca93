"""A quantised model diverges from its own de-quantised weights by far less than those do from the unquantised ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from bench.cpu.format_divergence import Engine, Reference, dialogues, divergences, from_folder, packed, write_float32

MOST_NATS = 1e-3
"""The 99th percentile of what activations of 8 bits add."""


@pytest.mark.parametrize(("name", "form", "group_size"), [("recall-gqa", "awq", 64), ("recall-mla", "mxfp4", 32)])
def test_the_engine_adds_little_to_the_loss_of_the_weights(
    name: str, form: str, group_size: int, check_models: Path, tmp_path: Path
) -> None:
    texts = dialogues(num=2, length=256)
    written = packed(form, group_size, write_float32(check_models / name, tmp_path / "float32"), tmp_path / form)
    right, twin = (Reference(model, texts) for model in (from_folder(check_models / name), written.reference()))
    engine = Engine(written.files, texts)
    if torch.cpu._is_avx512_bf16_supported():
        assert engine.held == "Q5_0"
    added, lost = (float(divergences(*pair).quantile(0.99)) for pair in ((twin, engine), (right, twin)))
    assert added < MOST_NATS
    assert added < lost / 4
