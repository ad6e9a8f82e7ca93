"""FP8 matrices that stay FP8 on a GPU: stored so, or quantised as they are read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from plait_kernels.linear import Fp8Matrix, Fp8Weight, Matrix
from plait_kernels.linear.fp8 import join, quantise_outputs
from plait_kernels.linear.fp8_matrix import can_multiply
from plait_kernels.moe import Experts, stack_fp8
from torch import Tensor

from plait_worker.weights.formats.dense import DENSE
from plait_worker.weights.formats.fp8_check import check_fp8, check_fp8_experts, check_fp8_gates
from plait_worker.weights.reader import ExpertShards, MatrixShard, Weights
from plait_worker.weights.source import TensorSource

_NEVER = ("head.weight", "embed_tokens.weight", "embed.weight")
"""The head stays in the model's own type: its error is every logit's."""


class Fp8Stored:
    """``WeightFormat`` of files with FP8 matrices."""

    is_quantised = True

    def stored_bytes(self, source: TensorSource, name: str) -> int | None:
        """From the header."""
        return None if name.endswith(_NEVER) else source.fp8_bytes(name)

    def read(self, weights: Weights, shard: MatrixShard) -> Fp8Weight | None:
        """Inputs are cut between blocks only."""
        if shard.is_padded or shard.name.endswith(_NEVER):
            return None
        weight = weights.fp8_weight(shard.name, shard.shape)
        if weight is not None and shard.rows is not None:
            weight = weight.rows(shard.rows.own)
        if weight is not None and shard.columns is not None:
            weight = weight.columns(shard.columns.own)
        return weight if weight is not None and can_multiply(weight) else None

    def join(self, weights: Weights, shards: Sequence[MatrixShard], stored: Sequence[Fp8Weight]) -> Fp8Weight | None:
        """On the device; None if only some have blocks."""
        joined = join([weight.to(weights.device) for weight in stored])
        if joined is not None:
            for shard, weight in zip(shards, stored, strict=True):
                weights.keep_fp8(shard.name, weight)
        return joined

    def matrix(self, stored: Fp8Weight, bias_O: Tensor | None, _dtype: torch.dtype, _activation_bits: int) -> Matrix:
        """Its inputs are rounded to FP8. Raises ``WorkerError`` if the GPU computes it wrong."""
        if stored.stored_OI.is_cuda:
            check_fp8(stored)
        return Fp8Matrix(stored, bias_O)

    def takes_experts(self, weights: Weights, first: ExpertShards) -> bool:
        """Whether the first one is FP8; all of a layer are stored alike."""
        return all(self.read(weights, shard) is not None for shards in first for shard in shards)

    def experts(self, stored: Iterator[tuple[Fp8Weight, Fp8Weight]], _dtype: torch.dtype) -> Experts:
        """In two stacks. Raises ``WorkerError`` if the GPU computes them wrong."""
        experts = stack_fp8(stored)
        if experts.down_EHI.stored_OI.is_cuda:
            check_fp8_experts(experts)
        return experts


class Fp8OnLoad(Fp8Stored):
    """``WeightFormat`` of any other files: each matrix gets a scale for each output as it is read."""

    def stored_bytes(self, source: TensorSource, name: str) -> int | None:
        """One byte an element: which matrices a layer reads is not known before."""
        shape = source.shape(name)
        is_taken = name.endswith(".weight") and len(shape) == 2 and not name.endswith(_NEVER)
        return shape[0] * (shape[1] + 4) if is_taken else None

    def read(self, weights: Weights, shard: MatrixShard) -> Fp8Weight | None:
        """The dense shard, quantised on the device."""
        sides = [len(cut) if cut is not None else side for cut, side in _sides(shard)]
        if shard.is_padded or shard.name.endswith(_NEVER) or any(side % 16 for side in sides):
            return None
        return quantise_outputs(DENSE.read(weights.uncounted(), shard))


def compile_gates(matrix: Fp8Matrix) -> None:
    """Let it apply the gates of few rows too. Raises ``WorkerError`` if the GPU computes them wrong."""
    matrix.compile_gates()
    if matrix.weight_OI.stored_OI.is_cuda:
        check_fp8_gates(matrix)


def _sides(shard: MatrixShard) -> tuple[tuple[range | None, int], tuple[range | None, int]]:
    rows, columns = (None if cut is None else cut.own for cut in (shard.rows, shard.columns))
    return (rows, shard.shape[0]), (columns, shard.shape[1])


FP8_STORED = Fp8Stored()
FP8_ON_LOAD = Fp8OnLoad()
