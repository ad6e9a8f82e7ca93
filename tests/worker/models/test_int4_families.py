"""Packed checkpoints of each kind of model, held as a GPU holds them in 4 bits, compute what the dense weights do.

The kernels' reference multiplies here; the kernels themselves are tried in tests/kernels.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from plait.plan.layout import Layout
from plait.plan.model import read_model as read_planned
from plait.plan.parts import EXPERTS, act_order_cost, parts_of
from plait_kernels.linear import Int4Matrix
from plait_kernels.moe import Int4Experts
from plait_testing.packed_models import FORMS, dense_twin, write_packed
from plait_testing.rank_threads import on_every_rank
from plait_worker.models.loader import open_checkpoint, open_config, read_model
from plait_worker.models.model import Model
from plait_worker.parallel import Parallel
from plait_worker.weights.dummy import DummyWeights
from plait_worker.weights.formats.int4 import INT4
from plait_worker.weights.packed.layout import Int4Form
from plait_worker.weights.reader import Weights
from plait_worker.weights.rope_order import in_neox_rope_order
from plait_worker.weights.weight_memory import WeightMemory

CPU = torch.device("cpu")
WIDE = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_hidden_layers": 2}
HEADS = {"num_key_value_heads": 2, "head_dim": 32}
MODELS = {
    "dense": ("qwen3", WIDE | HEADS),
    "experts": ("qwen3_moe", WIDE | HEADS | {"moe_intermediate_size": 64}),
    "partial rope": ("minimax_m2", WIDE | HEADS | {"rotary_dim": 16}),
}
CASES = [
    ("dense", "awq", 32),
    ("dense", "gptq", 64),
    ("dense", "gptq-act-order", 32),
    ("experts", "awq", 32),
    ("experts", "compressed-zeros", -1),
    ("experts", "gptq-act-order", 32),
    ("experts", "mxfp4", 32),
    ("experts", "gptq-8", 32),
    ("partial rope", "compressed", 32),
]


@pytest.fixture
def packed(save_tiny: Callable[..., Any], tmp_path: Path) -> Callable[..., Path]:
    """The folder of a model in packed integers; its neighbour is de-quantised."""

    def write(model: str, form: str, group_size: int) -> Path:
        family, changes = MODELS[model]
        write_packed(save_tiny(family, **changes).path, tmp_path / form, FORMS[form], group_size)
        return tmp_path / form

    return write


def load(
    folder: Path, parallel: Parallel, held: WeightMemory | None = None, dtype: torch.dtype = torch.float32
) -> Model[Any]:
    checkpoint = open_checkpoint(folder)
    source = in_neox_rope_order(checkpoint.source, checkpoint.config)
    weights = Weights(source, dtype, CPU, formats=[INT4], held=held)
    with torch.inference_mode():
        return read_model(checkpoint.config, weights, parallel, None)


def outputs(model: Model[Any], parallel: Parallel) -> torch.Tensor:
    """Queries, keys and values of this rank are not compared over ranks; the last layer's MLP is, summed."""
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(1))
    return parallel.all_reduce(model.blocks[-1].mlp(x))  # type: ignore[attr-defined]


@pytest.mark.parametrize(("model", "form", "group_size"), CASES)
def test_it_computes_as_the_dense_model_on_one_rank_and_two(
    model: str, form: str, group_size: int, packed: Callable[..., Path], tmp_path: Path
) -> None:
    folder = packed(model, form, group_size)
    held, dense = WeightMemory(), load(dense_twin(folder), Parallel())
    ours = load(folder, Parallel(), held)
    mixes_experts = model == "experts" and form == "gptq-act-order"
    stays = form != "gptq-8"
    kind = {"MXFP4"} if form == "mxfp4" else {"INT4"} if stays else set()
    assert ours.quantised_types == kind
    qkv, exact = (each.blocks[0].attention.qkv.multiply for each in (ours, dense))  # type: ignore[attr-defined]
    assert isinstance(qkv, Int4Matrix) == stays
    mlp = ours.blocks[-1].mlp  # type: ignore[attr-defined]
    if model == "experts":
        assert isinstance(mlp.experts, Int4Experts) == (stays and not mixes_experts)
    x = torch.randn(5, 64)
    torch.testing.assert_close(qkv(x), exact(x), atol=1e-3, rtol=1e-3)
    right = outputs(dense, Parallel())
    for given in (
        outputs(ours, Parallel()),
        *on_every_rank(2, tmp_path, lambda parallel: outputs(load(folder, parallel), parallel)),
    ):
        assert float((given - right).abs().max() / right.abs().max()) < 1e-3


def test_bytes_are_told_from_the_headers_as_they_are_held(packed: Callable[..., Path]) -> None:
    for model, form in (("dense", "awq"), ("experts", "mxfp4")):
        folder, held = packed(model, form, 32), WeightMemory()
        load(folder, Parallel(), held)
        source = open_checkpoint(folder).source
        quantised = [name for name in source.names if INT4.stored_bytes(source, name) is not None]
        assert len(quantised) > 10
        assert {name: held.taken[name] for name in quantised} == {
            name: INT4.stored_bytes(source, name) for name in quantised
        }


@pytest.mark.parametrize(("form", "stays_16_bit"), [("gptq", False), ("gptq-act-order", True)])
def test_the_plan_counts_experts_as_they_are_held(
    form: str, stays_16_bit: bool, packed: Callable[..., Path], tmp_path: Path
) -> None:
    folder, held = packed("experts", form, 32), WeightMemory()
    load(folder, Parallel(), held, torch.bfloat16)
    planned = read_planned(str(folder), tmp_path)
    experts = [each for each in Layout(1, 1).held(planned) if each.part.name == EXPERTS]
    taken = sum(num_bytes for name, num_bytes in held.taken.items() if ".experts." in name)
    assert sum(each.num_bytes for each in experts) == taken
    cost = act_order_cost(parts_of(planned), planned.storage.form)
    assert (None if cost is None else cost.num_bytes) == (taken if stays_16_bit else None)


@pytest.mark.parametrize("model", ["dense", "experts"])
def test_random_weights_take_the_bytes_that_are_counted_before(model: str, packed: Callable[..., Path]) -> None:
    config, taken = open_config(packed(model, "awq", 32)), []
    for device in ("meta", "cpu"):
        weights = DummyWeights(torch.float32, torch.device(device), None, [INT4], Int4Form(32, has_zero=True))
        made = read_model(config, weights, Parallel(), None)
        assert made.quantised_types == {"INT4"}
        taken.append(weights.held.taken)
    assert taken[0] == taken[1]
    codes = weights.int4_weight("a", (64, 256))
    assert codes is not None
    assert 0.019 < codes.dequantised().std() < 0.021
    assert abs(codes.dequantised().mean()) < 5e-4


@pytest.mark.parametrize(
    ("form", "group_size", "said"),
    [
        ("gptq-act-order", 32, "down_proj.weight is de-quantised: ranks would cut inputs that act-order mixes"),
        ("awq", 64, "down_proj.weight is de-quantised: ranks would cut groups of 64 inputs; fewer ranks keep it"),
    ],
)
def test_what_ranks_cannot_cut_is_named_and_dense(
    form: str, group_size: int, said: str, save_tiny: Callable[..., Any], tmp_path: Path, caplog: Any
) -> None:
    family, changes = MODELS["dense"]
    folder = tmp_path / form
    write_packed(save_tiny(family, **changes | {"intermediate_size": 192}).path, folder, FORMS[form], group_size)
    right = outputs(load(dense_twin(folder), Parallel()), Parallel())
    with caplog.at_level(logging.WARNING):
        given = on_every_rank(2, tmp_path, lambda parallel: outputs(load(folder, parallel), parallel))
    assert said in caplog.text
    assert float((given[0] - right).abs().max() / right.abs().max()) < 1e-3
