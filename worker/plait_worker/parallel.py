"""Tensor parallelism: the process group, the shard of a layer that a rank holds, and the collectives.

A world of one runs the same code; its collectives return their input.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.nn.functional as F
from plait_kernels.norm import add_rms_norm
from plait_proto import ExitCode
from torch import Tensor

from plait_worker.errors import WorkerError
from plait_worker.peers import Peers

if TYPE_CHECKING:
    from plait_worker.expert_parallel import ExpertParallel

# Its name before torch 2.13.
all_gather_single: Callable[..., object] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


@dataclass(frozen=True, slots=True)
class Shard:
    """A rank's units: heads, rows or columns."""

    own: range
    """Of the whole."""
    num_empty: int = 0
    """Padding units of zeros, which make every rank's shard the same size."""

    def __len__(self) -> int:
        """Units, the empty ones included."""
        return len(self.own) + self.num_empty

    def times(self, unit_size: int) -> Shard:
        """The same shard, counted in elements of a unit."""
        return Shard(range(self.own.start * unit_size, self.own.stop * unit_size), self.num_empty * unit_size)


@dataclass(frozen=True, slots=True)
class Parallel:
    """One rank of a replica.

    Raises ``ValueError`` if the world has more than one rank and no process group.
    """

    rank: int = 0
    """From 0."""
    world: int = 1
    """Ranks of the replica."""
    group: dist.ProcessGroup | None = None
    """Required if the world has more than one rank."""
    peers: Peers = field(default_factory=Peers)
    experts: ExpertParallel | None = None
    """The group that shares its experts; None divides each expert among the ranks of the replica."""
    setting: str = "of --tp"
    """Which ranks these are, for messages."""
    store: dist.Store | None = None
    """Where they met, if it must be kept: torch holds no reference to a store that is written in Python."""

    def __post_init__(self) -> None:
        """Check the fields."""
        if not 0 <= self.rank < self.world:
            raise ValueError(f"rank {self.rank} of {self.world}: a rank lies between 0 and the world's size")
        if self.world > 1 and self.group is None:
            raise ValueError(f"{self.world} ranks need a process group")

    @property
    def everyone(self) -> Parallel:
        """All ranks that must agree: the group's, if there is one."""
        return self if self.experts is None else self.experts.ranks

    def shard(self, num_units: int) -> range:
        """The units (heads, rows, experts' columns) of this rank.

        Raises ``ValueError`` if they cannot be divided evenly.
        """
        if num_units % self.world:
            raise ValueError(f"{num_units} heads, rows or columns cannot be divided among {self.world} ranks")
        size = num_units // self.world
        return range(self.rank * size, (self.rank + 1) * size)

    def shard_heads(self, num_heads: int, num_kv_heads: int) -> tuple[Shard, Shard]:
        """This rank's query heads, and the key-value heads that they read.

        See ``shard_heads``.
        """
        return shard_heads(num_heads, num_kv_heads, self.rank, self.world)

    def kv_copies(self, num_heads: int, num_kv_heads: int) -> int:
        """How many ranks hold the same key-value head."""
        return num_kv_copies(num_heads, num_kv_heads, self.world)

    def all_reduce(self, partial: Tensor) -> Tensor:
        """The sum over the ranks, in place and returned."""
        if self.world > 1:
            collective(lambda: dist.all_reduce(partial, group=self.group))
        return partial

    def add_rms_norm(
        self, partial_ND: Tensor, residual_ND: Tensor, weight_D: Tensor, eps: float, place: int
    ) -> tuple[Tensor, Tensor]:
        """The norm of the ranks' sum and the residual, and that sum; ``partial_ND`` may be overwritten.

        ``place`` is the layer's number among ``peers``.
        """
        if self.world > 1 and (fused := self.peers.add_rms_norm(partial_ND, residual_ND, weight_D, eps, place)):
            return fused
        return add_rms_norm(self.all_reduce(partial_ND), residual_ND, weight_D, eps)

    def exchange(self, own: bytes) -> list[bytes]:
        """Every rank's bytes, of one length, in rank order."""
        given = torch.frombuffer(bytearray(own), dtype=torch.uint8)
        return [bytes(row.tolist()) for row in self.all_gather(given).view(self.world, -1)]

    def all_gather(self, part: Tensor) -> Tensor:
        """The ranks' tensors, all of one shape, concatenated along the last dimension in rank order."""
        if self.world == 1:
            return part
        parts = part.new_empty(self.world * part.shape[0], *part.shape[1:])
        collective(lambda: all_gather_single(parts, part.contiguous(), group=self.group))
        return parts.view(self.world, *part.shape).movedim(0, -2).flatten(-2)

    def own_rows(self, num_rows: int) -> range:
        """The rows of a step that this rank samples; ranks have equal numbers, but for the last ones."""
        size = -(-num_rows // self.world)
        return range(min(self.rank * size, num_rows), min((self.rank + 1) * size, num_rows))

    def trade_columns_for_rows(self, part_SU: Tensor) -> Tensor:
        """From a rank's columns of all rows, all columns of its own rows, ``[C, world * U]``, filled up with zeros."""
        if self.world == 1:
            return part_SU
        size, width = -(-part_SU.shape[0] // self.world), part_SU.shape[1]
        sent = F.pad(part_SU, (0, 0, 0, size * self.world - part_SU.shape[0])).contiguous()
        received = torch.empty_like(sent)
        collective(lambda: dist.all_to_all_single(received, sent, group=self.group))
        return received.view(self.world, size, width).movedim(0, 1).flatten(1)

    def all_max(self, values: Tensor) -> Tensor:
        """The largest over the ranks, in place and returned."""
        if self.world > 1:
            collective(lambda: dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self.group))
        return values

    def broadcast(self, values: Tensor) -> Tensor:
        """Rank 0's tensor on every rank, in place and returned; all tensors have the same shape."""
        if self.world > 1:
            collective(lambda: dist.broadcast(values, group=self.group, group_src=0))
        return values

    def wait_for_all(self) -> None:
        """Barrier."""
        self.all_reduce(torch.zeros(1))


def shard_heads(num_heads: int, num_kv_heads: int, rank: int, world: int) -> tuple[Shard, Shard]:
    """A rank's query heads, and the key-value heads that they read; every rank has the same number of each.

    Key-value heads divide evenly; or neighbouring ranks hold a copy of the same one; or ranks hold whole groups of
    query heads with their key-value head, and the last ranks are padded with empty groups.
    """
    group = num_heads // num_kv_heads
    if num_kv_copies(num_heads, num_kv_heads, world) > 1:
        size, kv_head = num_heads // world, rank * num_kv_heads // world
        return Shard(range(rank * size, (rank + 1) * size)), Shard(range(kv_head, kv_head + 1))
    size = -(-num_kv_heads // world)
    own = range(min(rank * size, num_kv_heads), min((rank + 1) * size, num_kv_heads))
    kv_heads = Shard(own, size - len(own))
    return kv_heads.times(group), kv_heads


def num_kv_copies(num_heads: int, num_kv_heads: int, world: int) -> int:
    """How many ranks hold the same key-value head."""
    is_shared = world > num_kv_heads and world % num_kv_heads == 0 and num_heads % world == 0
    return world // num_kv_heads if is_shared else 1


def collective(call: Callable[[], object]) -> None:
    """Run a collective; raises ``WorkerError`` of code RANK_LOST if another rank is gone."""
    try:
        call()
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise WorkerError(ExitCode.RANK_LOST, f"another rank cannot be reached any more: {reason}") from error
