"""The comparison with transformers detects faults that are easily made: each moves log-probabilities far."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from plait_kernels.moe import Routing, route
from plait_worker.attention.model_specs import attention_specs
from plait_worker.attention.spec import AttentionSpec, MhaShape
from plait_worker.layers.norm import ProjectionNorm
from torch import Tensor

IDS = torch.randint(0, 61, (60,), generator=torch.Generator().manual_seed(7)).tolist()
ROUNDING = 2e-4
"""What the comparison allows."""
ROUTE = "plait_worker.layers.router.route"
Fault = Callable[[pytest.MonkeyPatch, Path], None]


def wrong_scale(patch: pytest.MonkeyPatch, _path: Path) -> None:
    def specs(*given: Any) -> list[AttentionSpec]:
        return [replace(spec, scale=0.2) for spec in attention_specs(*given) if isinstance(spec, MhaShape)]

    patch.setattr("plait_worker.models.loader.attention_specs", specs)


def window_one_too_wide(patch: pytest.MonkeyPatch, _path: Path) -> None:
    def specs(*given: Any) -> list[AttentionSpec]:
        return [replace(spec, window=14) for spec in attention_specs(*given) if isinstance(spec, MhaShape)]

    patch.setattr("plait_worker.models.loader.attention_specs", specs)


def no_bias(ending: str) -> Fault:
    def drop(_patch: pytest.MonkeyPatch, path: Path) -> None:
        tensors = safetensors.torch.load_file(path / "model.safetensors")
        (name,) = (name for name in tensors if f".1.{ending}" in name)
        tensors[name].zero_()
        safetensors.torch.save_file(tensors, path / "model.safetensors")

    return drop


def norm_of_each_head(patch: pytest.MonkeyPatch, _path: Path) -> None:
    def by_head(self: ProjectionNorm, x_NO: Tensor) -> Tensor:
        heads = F.rms_norm(x_NO.unflatten(1, (-1, 16)), (16,), eps=self.eps)
        return heads.flatten(1) * self.weight_O

    patch.setattr(ProjectionNorm, "__call__", by_head)


def rope_over_whole_heads(_patch: pytest.MonkeyPatch, path: Path) -> None:
    config = json.loads((path / "config.json").read_text())
    config["rope_parameters"]["partial_rotary_factor"] = 1.0
    (path / "config.json").write_text(json.dumps(config | {"rotary_dim": 16, "partial_rotary_factor": 1.0}))


def bias_that_weighs(patch: pytest.MonkeyPatch, _path: Path) -> None:
    def biased(logits_TE: Tensor, bias_E: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
        weights_TK, experts_TK = (logits_TE.sigmoid() + bias_E).topk(routing.top_k)
        return weights_TK / weights_TK.sum(dim=1, keepdim=True), experts_TK

    patch.setattr(ROUTE, biased)


def no_normalised_weights(patch: pytest.MonkeyPatch, _path: Path) -> None:
    def as_scored(logits_TE: Tensor, bias_E: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
        return route(logits_TE, bias_E, replace(routing, normalise=False))

    patch.setattr(ROUTE, as_scored)


FAULTS: dict[str, tuple[str, Fault]] = {
    "qwen2: scores scaled wrongly": ("qwen2", wrong_scale),
    "qwen2: no bias of the queries": ("qwen2", no_bias("self_attn.q_proj.bias")),
    "qwen2: no bias of the keys": ("qwen2", no_bias("self_attn.k_proj.bias")),
    "qwen2: no bias of the values": ("qwen2", no_bias("self_attn.v_proj.bias")),
    "mistral: a window one too wide": ("mistral", window_one_too_wide),
    "minimax_m2: scores scaled wrongly": ("minimax_m2", wrong_scale),
    "minimax_m2: no bias in the choice of experts": ("minimax_m2", no_bias("block_sparse_moe.e_score_correction_bias")),
    "minimax_m2: that bias in the experts' weights": ("minimax_m2", bias_that_weighs),
    "minimax_m2: experts' weights not normalised": ("minimax_m2", no_normalised_weights),
    "minimax_m2: each head normalised alone": ("minimax_m2", norm_of_each_head),
    "minimax_m2: rope over whole heads": ("minimax_m2", rope_over_whole_heads),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_shows_in_the_log_probabilities(
    fault: str, save_tiny: Callable[..., Any], drive: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    family, inject = FAULTS[fault]
    saved = save_tiny(family)
    expected = saved.logprobs(IDS)
    assert (drive(saved.path).step({"a": IDS})["a"] - expected).abs().max() < ROUNDING
    inject(monkeypatch, saved.path)
    assert (drive(saved.path).step({"a": IDS})["a"] - expected).abs().max() > 100 * ROUNDING
