"""The seam of weight formats: a layer reads its matrix in the first format that takes it, and else dense."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import pytest
import torch
import torch.distributed as dist
from plait_kernels.linear import Matrix
from plait_kernels.moe import Experts, pack_experts
from plait_worker.layers.linear import ColumnLinear, Projection, RowLinear
from plait_worker.layers.mlp import GatedMlp, SparseMlp, cut_shared
from plait_worker.model_config import ModelConfig, MoeConfig
from plait_worker.models.registry import read_config
from plait_worker.parallel import Parallel, Shard
from plait_worker.weights.fields import Fields
from plait_worker.weights.formats.dense import Dense
from plait_worker.weights.formats.read import read_experts
from plait_worker.weights.reader import ExpertShards, MatrixShard, WeightFormat, Weights
from torch import Tensor

CPU = torch.device("cpu")
SIZE = 32


class Negated(Dense):
    """Holds matrices negated, so that a result says which format computed it; it does not take padding."""

    def read(self, weights: Weights, shard: MatrixShard) -> Tensor | None:  # type: ignore[override]
        """None for a padded shard."""
        return None if shard.is_padded else super().read(weights, shard)

    def matrix(self, stored: Tensor, bias_O: Tensor | None, dtype: torch.dtype, activation_bits: int) -> Matrix:
        """By the negated weights."""
        return super().matrix(-stored, bias_O, dtype, activation_bits)

    def experts(self, stored: Iterator[tuple[Tensor, Tensor]], _dtype: torch.dtype) -> Experts:
        """With negated down projections."""
        return pack_experts((gate_up, -down) for gate_up, down in stored)


class OnlyLinear(Negated):
    """Has no kernel for experts."""

    def takes_experts(self, _weights: Weights, _first: ExpertShards) -> bool:
        """Never."""
        return False


class Source:
    """Tensors in memory."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.names = tensors.keys()
        self.read = tensors.__getitem__

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.read(name).shape)

    def block_weight(self, _name: str) -> None:
        """None is stored so."""

    def block_kind(self, _name: str) -> None:
        """None is stored so."""

    def fp8_weight(self, _name: str) -> None:
        """None is stored so."""

    def int4_weight(self, _name: str) -> None:
        """It is dense."""

    def int4_bytes(self, _name: str) -> None:
        """It is dense."""

    def fp8_bytes(self, _name: str) -> None:
        """None is stored so."""


def config_of() -> ModelConfig:
    fields = {"vocab_size": 8, "hidden_size": SIZE, "num_hidden_layers": 1, "num_attention_heads": 1}
    return read_config(Fields({**fields, "architectures": ["LlamaForCausalLM"], "intermediate_size": SIZE}, "c"))


def weights_of(tensors: dict[str, Tensor], *formats: WeightFormat[Tensor]) -> Weights:
    return Weights(Source(tensors), torch.float32, CPU, formats=formats)


@pytest.fixture
def tensors() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {f"{name}.weight": torch.randn(SIZE, SIZE) for name in ("a", "b")}


def test_the_first_format_that_takes_a_matrix_multiplies_by_it(tensors: dict[str, Tensor]) -> None:
    x = torch.randn(3, SIZE)
    a, b = Projection("a", SIZE), Projection("b", SIZE)
    chosen: list[tuple[list[WeightFormat[Tensor]], int]] = [
        ([], 1),
        ([Negated()], -1),
        ([Negated(), Dense()], -1),
        ([Dense(), Negated()], 1),
    ]
    for formats, sign in chosen:
        columns = ColumnLinear(weights_of(tensors, *formats), (a, b), SIZE, Parallel())
        torch.testing.assert_close(columns(x), sign * x @ torch.cat((tensors["a.weight"], tensors["b.weight"])).T)
        rows = RowLinear(weights_of(tensors, *formats), "b", a, SIZE, Parallel())
        torch.testing.assert_close(rows(x), sign * x @ tensors["b.weight"].T)


def test_what_a_format_does_not_take_is_read_dense(tensors: dict[str, Tensor]) -> None:
    x = torch.randn(3, SIZE)
    padded = Projection("a", SIZE, units=Shard(range(SIZE), num_empty=2))
    columns = ColumnLinear(weights_of(tensors, Negated()), (padded,), SIZE, Parallel())
    torch.testing.assert_close(columns(x)[:, :SIZE], x @ tensors["a.weight"].T)
    assert not columns(x)[:, SIZE:].any()


@pytest.mark.parametrize(("weight_format", "sign"), [(None, 1), (Negated(), -1), (OnlyLinear(), 1)])
def test_experts_are_stacked_by_the_first_format_that_has_kernels_for_them(
    weight_format: WeightFormat[Tensor] | None, sign: int
) -> None:
    torch.manual_seed(0)
    moe = MoeConfig(num_experts=4, num_experts_per_token=2, intermediate_size=SIZE, normalise_top_k=True)
    names = [f"experts.{expert}.{name}_proj.weight" for expert in range(4) for name in ("gate", "up", "down")]
    stored = {name: torch.randn(SIZE, SIZE) for name in names} | {"gate.weight": torch.randn(4, SIZE)}
    plain, other = (
        SparseMlp(config_of(), moe, weights_of(stored, *formats), Parallel())
        for formats in ((), () if weight_format is None else (weight_format,))
    )
    x = torch.randn(5, SIZE)
    torch.testing.assert_close(other(x), sign * plain(x))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_shared_mlp_that_is_cut_into_experts_is_their_sum(rank: int) -> None:
    """As on a GPU; a rank has half of the shared MLP's width."""
    torch.manual_seed(0)
    moe = MoeConfig(4, 2, intermediate_size=SIZE, normalise_top_k=True, shared_size=2 * SIZE)
    shapes = {"gate_proj": (2 * SIZE, SIZE), "up_proj": (2 * SIZE, SIZE), "down_proj": (SIZE, 2 * SIZE)}
    stored = {f"shared_experts.{name}.weight": torch.randn(shape) for name, shape in shapes.items()}
    parallel = Parallel(rank, 2, cast(dist.ProcessGroup, object()))
    experts = read_experts(weights_of(stored), cut_shared(config_of(), moe, parallel, 2))
    x = torch.randn(5, SIZE)
    both = torch.tensor([[0, 1]] * 5)
    whole = GatedMlp(config_of(), weights_of(stored).with_prefix("shared_experts"), parallel, 2 * SIZE)
    torch.testing.assert_close(experts(x, torch.ones(5, 2), both), whole(x))
