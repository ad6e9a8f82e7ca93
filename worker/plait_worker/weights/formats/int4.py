"""Matrices of 4-bit codes that stay so on a GPU: integers with a scale a group, and MXFP4."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

import torch
from plait_kernels.linear import Int4Matrix, Int4Weight, Matrix
from plait_kernels.linear.int4 import join
from plait_kernels.linear.int4_matrix import can_multiply
from plait_kernels.moe import Experts, stack_int4
from torch import Tensor

from plait_worker.weights.formats.int4_check import check_int4, check_int4_experts
from plait_worker.weights.reader import ExpertShards, MatrixShard, Weights
from plait_worker.weights.source import TensorSource

_log = logging.getLogger(__name__)
_NEVER = ("head.weight", "embed_tokens.weight", "embed.weight")
"""The head and the embedding stay in the model's own type."""


class Int4:
    """``WeightFormat`` of 4-bit codes."""

    is_quantised = True

    def stored_bytes(self, source: TensorSource, name: str) -> int | None:
        """From the header."""
        return None if name.endswith(_NEVER) else source.int4_bytes(name)

    def read(self, weights: Weights, shard: MatrixShard) -> tuple[Int4Weight, ...] | None:
        """Inputs are cut between groups, outputs between sixteens; the log names what cannot be cut."""
        if shard.name.endswith(_NEVER):
            return None
        whole = weights.int4_weight(shard.name, shard.shape)
        cut = None if whole is None or shard.is_padded else _cut(whole, shard)
        if whole is not None and cut is None:
            _log.warning(
                "weights: %s is de-quantised: ranks would cut %s; fewer ranks keep it in 4 bits",
                weights.prefix + shard.name,
                "inputs that act-order mixes" if whole.order_I is not None else f"groups of {whole.group_size} inputs",
            )
        return None if cut is None or not can_multiply(cut) else (cut,)

    def join(
        self, weights: Weights, shards: Sequence[MatrixShard], stored: Sequence[tuple[Int4Weight, ...]]
    ) -> tuple[Int4Weight, ...]:
        """On the device; as few as have one form each."""
        for shard, parts in zip(shards, stored, strict=True):
            for part in parts:
                weights.keep_int4(shard.name, part)
        return join([part.to(weights.device) for parts in stored for part in parts])

    def matrix(
        self, stored: tuple[Int4Weight, ...], bias_O: Tensor | None, _dtype: torch.dtype, _activation_bits: int
    ) -> Matrix:
        """Its inputs are not rounded. Raises ``WorkerError`` if the GPU computes it wrong."""
        for part in stored:
            if part.codes.is_cuda:
                check_int4(part)
        return Int4Matrix(stored, bias_O)

    def takes_experts(self, weights: Weights, first: ExpertShards) -> bool:
        """Whether the first one is of 4-bit codes; all of a layer are stored alike."""
        read = [self.read(weights, shard) for shards in first for shard in shards]
        return all(parts is not None and parts[0].order_I is None for parts in read)

    def experts(
        self, stored: Iterator[tuple[tuple[Int4Weight, ...], tuple[Int4Weight, ...]]], _dtype: torch.dtype
    ) -> Experts:
        """In two stacks. Raises ``WorkerError`` if the GPU computes them wrong."""
        experts = stack_int4((gate_up[0], down[0]) for gate_up, down in stored)
        if experts.down_EHI.codes.is_cuda:
            check_int4_experts(experts)
        return experts


def _cut(whole: Int4Weight, shard: MatrixShard) -> Int4Weight | None:
    cut: Int4Weight | None = whole
    if cut is not None and shard.rows is not None:
        cut = cut.rows(shard.rows.own)
    if cut is not None and shard.columns is not None:
        cut = cut.columns(shard.columns.own)
    return cut


INT4 = Int4()
