"""Matrices in quantised blocks, multiplied as they are by the compiled CPU kernels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from plait_kernels.linear import BlockWeight, CpuBlockMatrix, Matrix
from plait_kernels.linear.blocks import PANEL, join, panel_bytes
from plait_kernels.moe import Experts
from plait_kernels.moe.cpu import ExpertPanels
from torch import Tensor

from plait_worker.weights.reader import ExpertShards, MatrixShard, Weights
from plait_worker.weights.source import TensorSource

_BITS = 8
"""Activation bits of experts."""


class Blocks:
    """``WeightFormat`` of matrices whose block type has a kernel."""

    is_quantised = True

    def stored_bytes(self, source: TensorSource, name: str) -> int | None:
        """Of its panels, from the header."""
        kind = source.block_kind(name)
        return None if kind is None else panel_bytes(kind, *source.shape(name))

    def read(self, weights: Weights, shard: MatrixShard) -> tuple[BlockWeight, ...] | None:
        """Padding has no blocks, and inputs are cut between blocks only."""
        if shard.is_padded:
            return None
        weight = weights.block_weight(shard.name, shard.shape)
        if weight is not None and shard.rows is not None:
            weight = weight.rows(shard.rows.own)
        if weight is not None and shard.columns is not None:
            weight = weight.columns(shard.columns.own)
        return None if weight is None else (weight,)

    def join(
        self, weights: Weights, shards: Sequence[MatrixShard], stored: Sequence[tuple[BlockWeight, ...]]
    ) -> tuple[BlockWeight, ...] | None:
        """Block types may differ: None if one ends within a panel."""
        joined = join([part for parts in stored for part in parts])
        if joined is not None:
            for shard, parts in zip(shards, stored, strict=True):
                for part in parts:
                    weights.keep(shard.name, part)
        return joined

    def matrix(
        self, stored: tuple[BlockWeight, ...], bias_O: Tensor | None, dtype: torch.dtype, activation_bits: int
    ) -> Matrix:
        """Inputs of ``dtype`` are rounded to ``activation_bits``."""
        return CpuBlockMatrix(stored, bias_O, dtype, activation_bits)

    def takes_experts(self, weights: Weights, first: ExpertShards) -> bool:
        """Whether the first one can be kept, and gates end with a panel; all of a layer are stored alike."""
        gate_up, down = ([self.read(weights, shard) for shard in shards] for shards in first)
        if None in gate_up or None in down:
            return False
        return all(part.shape[0] % PANEL == 0 for parts in gate_up if parts is not None for part in parts)

    def experts(
        self, stored: Iterator[tuple[tuple[BlockWeight, ...], tuple[BlockWeight, ...]]], dtype: torch.dtype
    ) -> Experts:
        """Rows of ``dtype`` are quantised to 8 bits."""

        def packed(parts: Sequence[BlockWeight]) -> CpuBlockMatrix:
            return CpuBlockMatrix(parts, None, dtype, _BITS)

        return ExpertPanels((packed(gate_up), packed(down)) for gate_up, down in stored)


BLOCKS = Blocks()
