"""Reorders the rows of queries and keys so that rope rotates halves, whatever order the files have."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection

import torch
from plait_kernels.linear import BlockWeight, Fp8Weight, Int4Weight
from plait_kernels.linear.fp8 import FP8
from torch import Tensor

from plait_worker.model_config import MlaConfig, ModelConfig
from plait_worker.weights.source import TensorSource

_QUERY = ("self_attn.q_proj", "self_attn.q_b_proj")
_KEY = ("self_attn.kv_a_proj_with_mqa",)
_HEADS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.q_norm", "self_attn.k_norm")


def in_neox_rope_order(source: TensorSource, config: ModelConfig) -> TensorSource:
    """The source in the order in which rope rotates elements ``i`` and ``i + head_dim / 2`` of a head together."""
    if config.mla is not None:
        return DeinterleavedSource(source, config.mla) if config.mla.is_interleaved else source
    rotary_dim = config.rope.rotary_dim or config.head_dim
    return source if rotary_dim == config.head_dim else PartialRotarySource(source, config.head_dim, rotary_dim)


class _ReorderedSource(ABC):
    """A source that reorders rows of some tensors."""

    def __init__(self, source: TensorSource) -> None:
        """``source`` stays as it is."""
        self.source = source

    @property
    def names(self) -> Collection[str]:
        """The source's."""
        return self.source.names

    def shape(self, name: str) -> tuple[int, ...]:
        """The source's."""
        return self.source.shape(name)

    def read(self, name: str) -> Tensor:
        """The source's tensor, with its rows in the order of halves."""
        return self._reordered(name, self.source.read(name))

    @abstractmethod
    def _reordered(self, name: str, rows: Tensor) -> Tensor:
        """Those of one tensor."""

    def fp8_weight(self, name: str) -> Fp8Weight | None:
        """The source's; None if rows would leave their block."""
        weight = self.source.fp8_weight(name)
        if weight is None:
            return None
        before_O = torch.arange(weight.shape[0])
        order_O = self._reordered(name, before_O)
        if torch.equal(order_O, before_O):
            return weight
        stored_OI = weight.stored_OI.view(torch.uint8)[order_O].view(FP8)
        if not weight.block_rows:
            return Fp8Weight(stored_OI, weight.scale[order_O])
        is_in_block = torch.equal(order_O // weight.block_rows, before_O // weight.block_rows)
        return Fp8Weight(stored_OI, weight.scale, weight.block_rows) if is_in_block else None

    def fp8_bytes(self, name: str) -> int | None:
        """The source's."""
        return self.source.fp8_bytes(name)

    def int4_weight(self, name: str) -> Int4Weight | None:
        """The source's, with its rows in the same order."""
        weight = self.source.int4_weight(name)
        if weight is None:
            return None
        before_O = torch.arange(weight.shape[0])
        order_O = self._reordered(name, before_O)
        return weight if torch.equal(order_O, before_O) else weight.reordered(order_O)

    def int4_bytes(self, name: str) -> int | None:
        """The source's."""
        return self.source.int4_bytes(name)

    def block_weight(self, name: str) -> BlockWeight | None:
        """The source's, with its rows in the same order."""
        weight = self.source.block_weight(name)
        return weight and BlockWeight(weight.kind, self._reordered(name, weight.raw))

    def block_kind(self, name: str) -> str | None:
        """The source's."""
        return self.source.block_kind(name)


class DeinterleavedSource(_ReorderedSource):
    """``TensorSource`` of MLA files whose rope rotates neighbours ``(2 i, 2 i + 1)``, given as halves ``(i, F + i)``.

    It reorders the rows of rope's part of queries and keys. Scores are sums over these elements, so the same order in
    both leaves them unchanged.
    """

    def __init__(self, source: TensorSource, mla: MlaConfig) -> None:
        """``source`` stays as it is."""
        super().__init__(source)
        self.mla = mla

    def _reordered(self, name: str, rows: Tensor) -> Tensor:
        """Of each unit the last ``rope_dim`` outputs."""
        stem = name.rpartition(".")[0]
        if stem.endswith(_QUERY):
            return deinterleave_rope(rows, self.mla.query_dim, self.mla.rope_dim)
        return deinterleave_rope(rows, self.mla.cached_dim, self.mla.rope_dim) if stem.endswith(_KEY) else rows


class PartialRotarySource(_ReorderedSource):
    """``TensorSource`` of files whose rope rotates the first elements of each head as if there were no others.

    Each half of those moves to the start of a half of the head. Scores are sums over a head's elements, so the same
    order in queries and keys leaves them unchanged.
    """

    def __init__(self, source: TensorSource, head_dim: int, rotary_dim: int) -> None:
        """``source`` stays as it is."""
        super().__init__(source)
        self.head_dim = head_dim
        self.rotary_dim = rotary_dim

    def _reordered(self, name: str, rows: Tensor) -> Tensor:
        """Of queries, keys and their norms."""
        if not name.rpartition(".")[0].endswith(_HEADS):
            return rows
        heads = rows.reshape(-1, self.head_dim, *rows.shape[1:])
        rotary, fixed = heads[:, : self.rotary_dim].chunk(2, dim=1), heads[:, self.rotary_dim :].chunk(2, dim=1)
        return torch.cat((rotary[0], fixed[0], rotary[1], fixed[1]), dim=1).view(rows.shape)


def deinterleave_rope(tensor: Tensor, unit_size: int, rope_dim: int) -> Tensor:
    """Of every ``unit_size`` rows the last ``rope_dim``: those of even index first, then those of odd index."""
    units = tensor.reshape(-1, unit_size, *tensor.shape[1:]).clone()
    rope = units[:, -rope_dim:]
    units[:, -rope_dim:] = torch.cat((rope[:, 0::2], rope[:, 1::2]), dim=1)
    return units.view(tensor.shape)
