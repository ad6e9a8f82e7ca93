"""Dense weights, in the model's own type."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from plait_kernels.linear import Matrix, dense_matrix
from plait_kernels.moe import Experts, pack_experts
from torch import Tensor

from plait_worker.weights.reader import ExpertShards, MatrixShard, Weights
from plait_worker.weights.source import TensorSource


class Dense:
    """``WeightFormat`` that takes every matrix."""

    is_quantised = False

    def stored_bytes(self, _source: TensorSource, _name: str) -> int | None:
        """``Weights`` counts dense matrices."""
        return None

    def read(self, weights: Weights, shard: MatrixShard) -> Tensor:
        """``[O, I]``, padded with zeros."""
        rows, columns = (None if each is None else each.own for each in (shard.rows, shard.columns))
        weight_OI = weights.take(shard.name, shard.shape, rows, columns)
        if not shard.is_padded:
            return weight_OI
        no_outputs, no_inputs = (0 if each is None else each.num_empty for each in (shard.rows, shard.columns))
        return F.pad(weight_OI, (0, no_inputs, 0, no_outputs))

    def join(self, _weights: Weights, _shards: Sequence[MatrixShard], stored: Sequence[Tensor]) -> Tensor:
        """One below the other."""
        return stored[0] if len(stored) == 1 else torch.cat(list(stored))

    def matrix(self, stored: Tensor, bias_O: Tensor | None, _dtype: torch.dtype, _activation_bits: int) -> Matrix:
        """The fastest for the device."""
        return dense_matrix(stored, bias_O)

    def takes_experts(self, _weights: Weights, _first: ExpertShards) -> bool:
        """Always."""
        return True

    def experts(self, stored: Iterator[tuple[Tensor, Tensor]], _dtype: torch.dtype) -> Experts:
        """In one tensor, or compiled on a CPU."""
        return pack_experts(stored)


DENSE = Dense()
