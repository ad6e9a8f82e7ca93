"""Weights in GGUF blocks, kept as in the file, and their values.

https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h

Shapes: O outputs, I inputs, N rows, B blocks of a row, Y bytes of a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from plait_kernels.linear.block_values import block_values

PANEL = 32
"""Outputs that the kernels compute together."""
ACTIVATION_BLOCK = 32
"""Elements of a row that are quantised with one scale."""
ACTIVATION_LIMITS = {8: 127, 16: 127 * 256 + 127}
"""Bits of a quantised activation, with the largest integer of each."""


@dataclass(frozen=True, slots=True)
class BlockKind:
    """A block type that has a kernel."""

    inputs: int
    """Of a block."""
    file_bytes: int
    """Of a block in the file."""
    panel_bytes: int
    """Of a block in a panel, where small scales take whole bytes."""


KINDS = {
    "Q4_0": BlockKind(32, 18, 18),
    "Q4_1": BlockKind(32, 20, 20),
    "Q5_0": BlockKind(32, 22, 22),
    "Q5_1": BlockKind(32, 24, 24),
    "Q8_0": BlockKind(32, 34, 34),
    "Q4_K": BlockKind(256, 144, 148),
    "Q5_K": BlockKind(256, 176, 180),
    "Q6_K": BlockKind(256, 210, 210),
}


@dataclass(frozen=True, slots=True)
class BlockWeight:
    """A matrix in quantised blocks, as a file or our repacking has them."""

    kind: str
    """One of ``KINDS``."""
    raw: Tensor
    """uint8 ``[O, B Y]``."""

    @property
    def shape(self) -> tuple[int, int]:
        """``(O, I)``."""
        num_outputs, num_bytes = self.raw.shape
        kind = KINDS[self.kind]
        return num_outputs, num_bytes // kind.file_bytes * kind.inputs

    def rows(self, rows: range) -> BlockWeight:
        """Some outputs."""
        return BlockWeight(self.kind, self.raw[rows.start : rows.stop])

    def columns(self, columns: range) -> BlockWeight | None:
        """Some inputs; None if they begin or end within a block."""
        kind = KINDS[self.kind]
        if columns.start % kind.inputs or columns.stop % kind.inputs:
            return None
        first, end = (bound // kind.inputs * kind.file_bytes for bound in (columns.start, columns.stop))
        return BlockWeight(self.kind, self.raw[:, first:end])

    def dequantised(self) -> Tensor:
        """The blocks' values, float32 ``[O, I]``."""
        return block_values(self.kind, self.raw.unflatten(1, (-1, KINDS[self.kind].file_bytes))).flatten(1)


def panel_bytes(kind: str, num_outputs: int, num_inputs: int) -> int:
    """What the kernels hold of a matrix, but for the padding of its last panel."""
    return num_outputs * num_inputs // KINDS[kind].inputs * KINDS[kind].panel_bytes


def join(parts: Sequence[BlockWeight]) -> tuple[BlockWeight, ...] | None:
    """Matrices over the same inputs, one below the other: as few as have one block type each.

    None if the block type changes within a panel.
    """
    joined: list[BlockWeight] = []
    for part in parts:
        if joined and joined[-1].kind == part.kind:
            joined[-1] = BlockWeight(part.kind, torch.cat([joined[-1].raw, part.raw]))
        else:
            joined.append(part)
    return None if any(part.shape[0] % PANEL for part in joined[:-1]) else tuple(joined)


def quantise_and_dequantise(x_NI: Tensor, activation_bits: int) -> Tensor:
    """``x`` as ``CpuBlockMatrix`` quantises it, float32 ``[N, I]``: integers times a scale for each 32 elements."""
    most = ACTIVATION_LIMITS[activation_bits]
    x_NB32 = x_NI.float().unflatten(1, (-1, ACTIVATION_BLOCK))
    largest_NB1 = x_NB32.abs().amax(dim=2, keepdim=True)
    # torch would compute number / tensor as number * (1 / tensor), which rounds twice.
    factor_NB1 = torch.where(largest_NB1 > 0, torch.full_like(largest_NB1, most) / largest_NB1, 0)
    rounded_NB32: Tensor = (x_NB32 * factor_NB1).round() * (largest_NB1 / most)
    return rounded_NB32.flatten(1)
