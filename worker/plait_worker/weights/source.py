"""Opened model files, whatever their format."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from plait_kernels.linear import BlockWeight, Fp8Weight, Int4Weight
from torch import Tensor


class TensorSource(Protocol):
    """Opened model files."""

    @property
    def names(self) -> Collection[str]:
        """Every tensor's name, as Hugging Face spells it."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape, without reading it."""
        ...

    def read(self, name: str) -> Tensor:
        """A tensor on the CPU, in the file's floating type or, de-quantised, in float32."""
        ...

    def block_weight(self, name: str) -> BlockWeight | None:
        """A matrix in quantised blocks; None if it is stored otherwise, or its block type has no kernel."""
        ...

    def block_kind(self, name: str) -> str | None:
        """The kind of ``block_weight``, without reading it; None if that is None."""
        ...

    def fp8_weight(self, name: str) -> Fp8Weight | None:
        """An FP8 matrix as the files have it, on the CPU; None if it is of another type, or in other blocks."""
        ...

    def fp8_bytes(self, name: str) -> int | None:
        """What ``fp8_weight`` would take, without reading it."""
        ...

    def int4_weight(self, name: str) -> Int4Weight | None:
        """A matrix of 4-bit codes on the CPU, repacked; None if it is of another type, or of other groups."""
        ...

    def int4_bytes(self, name: str) -> int | None:
        """What ``int4_weight`` would take at least, without reading it."""
        ...
