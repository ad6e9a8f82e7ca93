"""Reads a layer's matrices in the first of the weights' formats that takes them.

Shapes: I inputs and O outputs of this rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import TypeVar

from plait_kernels.linear import Matrix
from plait_kernels.moe import Experts
from torch import Tensor

from plait_worker.weights.formats.dense import DENSE
from plait_worker.weights.reader import ExpertShards, MatrixShard, WeightFormat, Weights

A8, A16 = 8, 16
"""Activation bits of a GEMM with quantised weights. A16 takes twice as long; it is for what moves a model's answers
most: queries, keys and the head."""

StoredT = TypeVar("StoredT")


def read_matrix(
    weights: Weights, shards: Sequence[MatrixShard], bias_O: Tensor | None = None, activation_bits: int = A8
) -> Matrix:
    """The matrices in one, outputs in order."""
    for weight_format in weights.formats:
        found = _matrix_in(weight_format, weights, shards, bias_O, activation_bits)
        if found is not None:
            return found
    return DENSE.matrix(_read_stored(DENSE, weights, shards), bias_O, weights.dtype, activation_bits)


def read_quantised(weights: Weights, shard: MatrixShard, activation_bits: int) -> Matrix | None:
    """A matrix that stays quantised; None if no format takes it so."""
    quantised = (each for each in weights.formats if each.is_quantised)
    found = (_matrix_in(each, weights, [shard], None, activation_bits) for each in quantised)
    return next((matrix for matrix in found if matrix is not None), None)


def read_experts(weights: Weights, experts: Iterable[ExpertShards]) -> Experts:
    """The stack of experts, in one format."""
    experts = iter(experts)
    first = next(experts)
    taking = (each for each in weights.formats if each.takes_experts(weights, first))
    return _stack(next(taking, DENSE), weights, chain((first,), experts))


def _stack(weight_format: WeightFormat[StoredT], weights: Weights, experts: Iterable[ExpertShards]) -> Experts:
    return weight_format.experts(
        (
            (_read_stored(weight_format, weights, gate_up), _read_stored(weight_format, weights, down))
            for gate_up, down in experts
        ),
        weights.dtype,
    )


def _read_stored(weight_format: WeightFormat[StoredT], weights: Weights, shards: Sequence[MatrixShard]) -> StoredT:
    stored = _read_joined(weight_format, weights, shards)
    if stored is None:
        raise AssertionError(f"{type(weight_format).__name__} takes experts and does not take {shards[0].name}")
    return stored


def _matrix_in(
    weight_format: WeightFormat[StoredT],
    weights: Weights,
    shards: Sequence[MatrixShard],
    bias_O: Tensor | None,
    activation_bits: int,
) -> Matrix | None:
    stored = _read_joined(weight_format, weights, shards)
    return None if stored is None else weight_format.matrix(stored, bias_O, weights.dtype, activation_bits)


def _read_joined(
    weight_format: WeightFormat[StoredT], weights: Weights, shards: Sequence[MatrixShard]
) -> StoredT | None:
    """The shards in one format, joined; None if it does not take them all."""
    read = [weight_format.read(weights, shard) for shard in shards]
    stored = [each for each in read if each is not None]
    return weight_format.join(weights, shards, stored) if len(stored) == len(shards) else None
