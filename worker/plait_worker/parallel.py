"""Tensor parallelism: which share of a layer a rank holds, and how the ranks' results are joined.

A world of one runs the same code; its collectives return what they were given.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Parallel:
    """One rank of a replica.

    Raises ``ValueError`` where the world has more than one rank and no group to talk through.
    """

    rank: int = 0
    """From 0."""
    world: int = 1
    """Ranks of the replica."""
    group: dist.ProcessGroup | None = None
    """How the ranks talk; needed where there are several."""

    def __post_init__(self) -> None:
        """Check that the parts fit together."""
        if not 0 <= self.rank < self.world:
            raise ValueError(f"rank {self.rank} of {self.world}: a rank lies between 0 and the world's size")
        if self.world > 1 and self.group is None:
            raise ValueError(f"{self.world} ranks need a process group")

    def share(self, num_units: int) -> range:
        """The units (heads, rows, experts' columns) of this rank.

        Units divide evenly. Where there are fewer units than ranks, neighbouring ranks hold the same
        one (key-value heads). Raises ``ValueError`` where neither comes out even.
        """
        if num_units % self.world == 0:
            size = num_units // self.world
            return range(self.rank * size, (self.rank + 1) * size)
        if self.world % num_units == 0:
            unit = self.rank * num_units // self.world
            return range(unit, unit + 1)
        raise ValueError(f"{num_units} heads, rows or columns cannot be divided among {self.world} ranks")

    def all_reduce(self, partial: Tensor) -> Tensor:
        """The sum over the ranks, in place and returned."""
        if self.world > 1:
            dist.all_reduce(partial, group=self.group)
        return partial

    def all_gather(self, part: Tensor) -> Tensor:
        """The ranks' tensors (all of one shape), joined along the last dimension in the order of the ranks."""
        if self.world == 1:
            return part
        parts = [torch.empty_like(part) for _ in range(self.world)]
        dist.all_gather(parts, part.contiguous(), group=self.group)
        return torch.cat(parts, dim=-1)

    def broadcast(self, values: Tensor) -> Tensor:
        """Rank 0's tensor on every rank, in place and returned; all give one of the same shape."""
        if self.world > 1:
            dist.broadcast(values, group=self.group, group_src=0)
        return values
