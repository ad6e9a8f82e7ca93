"""Packed checkpoints of each kind of model compute what the same weights compute dense, on one rank and on two."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from plait_testing.packed_models import FORMS, dense_twin, write_packed
from plait_testing.rank_threads import on_every_rank
from plait_worker.models.loader import load_model
from plait_worker.models.model import Model
from plait_worker.parallel import Parallel

CPU = torch.device("cpu")
IDS = list(range(3, 43))
WIDE = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_hidden_layers": 2}
HEADS = {"num_key_value_heads": 2, "head_dim": 32}
MLA = {
    "num_key_value_heads": 4,
    "q_lora_rank": 64,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "moe_intermediate_size": 64,
}
MODELS = {
    "experts": ("qwen3_moe", WIDE | HEADS | {"moe_intermediate_size": 64}),
    "partial rope": ("minimax_m2", WIDE | HEADS | {"rotary_dim": 16}),
    "mla": ("deepseek_v3", WIDE | MLA),
    "mla in halves": ("deepseek_v3", WIDE | MLA | {"rope_interleave": False}),
}
CASES = [
    ("experts", "awq", 32),
    ("experts", "gptq", -1),
    ("experts", "gptq-act-order", 32),
    ("experts", "compressed-8", 64),
    ("partial rope", "awq", 32),
    ("partial rope", "compressed", 32),
    ("mla", "awq", 32),
    ("mla", "gptq-zeros", 32),
    ("experts", "mxfp4", 32),
    ("mla", "mxfp4", 32),
    ("mla in halves", "compressed-zeros", 32),
]


@pytest.fixture
def packed(save_tiny: Callable[..., Any], tmp_path: Path) -> Callable[..., Path]:
    """The folder of a model in packed integers; its neighbour is de-quantised."""

    def write(model: str, form: str, group_size: int) -> Path:
        family, changes = MODELS[model]
        folder = tmp_path / form
        write_packed(save_tiny(family, **changes).path, folder, FORMS[form], group_size)
        return folder

    return write


@pytest.mark.parametrize(("model", "form", "group_size"), CASES)
def test_dequantised_it_is_the_dense_model(
    model: str, form: str, group_size: int, packed: Callable[..., Path], drive: Callable[..., Any]
) -> None:
    folder = packed(model, form, group_size)
    ours, theirs = (drive(path).step({"a": IDS})["a"] for path in (folder, dense_twin(folder)))
    assert ours.std() > 0.05
    assert torch.equal(ours, theirs)


@pytest.mark.skipif(not torch.cpu._is_avx512_bf16_supported(), reason="quantised weights want AVX512-BF16")
@pytest.mark.parametrize(("model", "form", "group_size"), CASES)
def test_in_blocks_it_is_near_the_dense_model(
    model: str, form: str, group_size: int, packed: Callable[..., Path], drive: Callable[..., Any]
) -> None:
    """On average: rounded activations may choose another expert for a token."""
    folder = packed(model, form, group_size)
    kept = drive(folder, dtype="auto")
    assert bool(kept.model.quantised_types) == ("act-order" not in form)
    exact = drive(dense_twin(folder)).step({"a": IDS})["a"]
    error = (kept.step({"a": IDS})["a"].float() - exact).abs().mean()
    assert error < 0.1 * exact.std()


def mlp_output(model: Model[Any], parallel: Parallel) -> torch.Tensor:
    """Of the last layer's experts, summed over the ranks."""
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(1)).to(model.dtype)
    return parallel.all_reduce(model.blocks[-1].mlp(x)).float()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("model", "form", "group_size"),
    [*CASES[:4], ("mla", "awq", 32), ("partial rope", "compressed", 32), ("mla", "mxfp4", 32)],
)
@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_two_ranks_compute_what_one_computes(
    model: str, form: str, group_size: int, dtype: str, packed: Callable[..., Path], tmp_path: Path
) -> None:
    folder = packed(model, form, group_size)

    def output(parallel: Parallel) -> torch.Tensor:
        return mlp_output(load_model(folder, dtype, CPU, parallel), parallel)

    alone, most = output(Parallel()), 1e-4 if dtype == "float32" else 0.05
    for together in on_every_rank(2, tmp_path, output):
        assert (together - alone).abs().max() < most * alone.abs().max()
