"""Layers attend by the backend of their spec: here some in a sliding window and others over all."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from plait_worker.attention.backend import AttentionBackend
from plait_worker.attention.model_attention import JointPrefill, ModelAttention
from plait_worker.attention.model_specs import attention_specs
from plait_worker.attention.spec import AttentionSpec, MhaShape
from plait_worker.graph_sizes import GraphSize
from plait_worker.models.loader import dummy_model, load_model
from plait_worker.parallel import Parallel
from plait_worker.rows import Rows

WINDOW, FIRST_IN_WINDOW = 8, 1
IDS = torch.randint(2, 61, (70,), generator=torch.Generator().manual_seed(3)).tolist()


def specs_with_windows(*given: Any) -> list[AttentionSpec]:
    """Layers from the second on see a window."""
    return [
        replace(spec, window=WINDOW if layer >= FIRST_IN_WINDOW else None)
        for layer, spec in enumerate(attention_specs(*given))
        if isinstance(spec, MhaShape)
    ]


def save_with_windows(save_tiny: Callable[..., Any]) -> Any:
    """transformers' Qwen2, whose later layers see a window; our reader is not told of it."""
    saved = save_tiny("qwen2", use_sliding_window=True, sliding_window=WINDOW, max_window_layers=FIRST_IN_WINDOW)
    path: Path = saved.path / "config.json"
    config = json.loads(path.read_text())
    assert set(config["layer_types"]) == {"full_attention", "sliding_attention"}
    full = ["full_attention"] * len(config["layer_types"])
    path.write_text(json.dumps(config | {"use_sliding_window": False, "layer_types": full}))
    return saved


@dataclass
class Counted:
    """A backend that counts the steps that it prepares."""

    backend: AttentionBackend[Any]
    num_prepared: int = 0
    name: str = "cpu"
    is_capturable: bool = False
    captured_prefill: None = None

    def prepare(self, rows: Rows) -> Any:
        self.num_prepared += 1
        return self.backend.prepare(rows)


def test_layers_with_and_without_a_window_compute_what_transformers_does(
    save_tiny: Callable[..., Any], drive: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = save_with_windows(save_tiny)
    monkeypatch.setattr("plait_worker.models.loader.attention_specs", specs_with_windows)
    driver = drive(saved.path)
    counted = [Counted(backend) for backend in driver.attention.backends]
    driver.attention = ModelAttention(counted)
    chunks = [driver.step({"prompt": IDS[:30]}), driver.step({"prompt": IDS[30:65]})]
    chunks += [driver.step({}, {"prompt": token}) for token in IDS[65:]]
    given = torch.cat([chunk["prompt"] for chunk in chunks])
    torch.testing.assert_close(given, saved.logprobs(IDS), atol=2e-4, rtol=0)
    assert [backend.num_prepared for backend in counted] == [len(chunks)] * 2


@pytest.mark.parametrize(("max_model_len", "is_windowed"), [(None, True), (WINDOW + 1, True), (WINDOW, False)])
def test_a_window_that_no_request_outgrows_is_none(
    save_tiny: Callable[..., Any], max_model_len: int | None, is_windowed: bool
) -> None:
    path = save_tiny("mistral", sliding_window=WINDOW).path
    cpu = torch.device("cpu")
    for model in (
        load_model(path, "float32", cpu, Parallel(), max_model_len=max_model_len),
        dummy_model(path, "float32", cpu, Parallel(), max_model_len=max_model_len),
    ):
        specs = [spec for spec in model.attention_specs if isinstance(spec, MhaShape)]
        assert len(specs) == model.config.num_layers
        assert all((spec.window is not None) == is_windowed for spec in specs)


@dataclass(frozen=True)
class Choosing:
    """Captured prefill that takes one size and notes what it plans."""

    choice: GraphSize | None
    contexts: Sequence[int] = ()
    planned: list[GraphSize] = field(default_factory=list)

    def choose(self, _roomy: Sequence[GraphSize], _starts: Sequence[int], _lengths: Sequence[int]) -> GraphSize | None:
        return self.choice

    def plan(self, size: GraphSize, _starts: Sequence[int], _lengths: Sequence[int]) -> None:
        self.planned.append(size)


def test_one_captured_step_serves_the_backends_of_all_layers() -> None:
    small, large = GraphSize(128, 17, 4), GraphSize(256, 17, 4)
    both = JointPrefill([Choosing(large, (0, 1024)), Choosing(small, (512,))])
    assert both.contexts == [0, 512, 1024]
    assert both.choose([small, large], [0], [9]) == large
    both.plan(large, [0], [9])
    assert [member.planned for member in both.members] == [[large], [large]]  # type: ignore[attr-defined]
    assert JointPrefill([Choosing(small), Choosing(None)]).choose([small], [0], [9]) is None
