"""Weights in GGUF blocks of 32 inputs, kept as in the file, and their values.

https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h

Shapes: O outputs, I inputs, N rows, B = I / 32 blocks of a row, Y bytes of a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 32
"""Inputs of a block."""
BLOCK_BYTES = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}
"""The block types that have a kernel, with the bytes of a block."""
ACTIVATION_LIMITS = {8: 127, 16: 127 * 256 + 127}
"""Bits of a quantised activation, with the largest integer of each."""


@dataclass(frozen=True, slots=True)
class GgufWeight:
    """A matrix as a GGUF stores it."""

    kind: str
    """One of ``BLOCK_BYTES``."""
    raw: Tensor
    """uint8 ``[O, B Y]``."""

    @property
    def shape(self) -> tuple[int, int]:
        """``(O, I)``."""
        num_outputs, num_bytes = self.raw.shape
        return num_outputs, num_bytes // BLOCK_BYTES[self.kind] * BLOCK

    def rows(self, rows: range) -> GgufWeight:
        """Some outputs."""
        return GgufWeight(self.kind, self.raw[rows.start : rows.stop])

    def columns(self, columns: range) -> GgufWeight | None:
        """Some inputs; None if they begin or end within a block."""
        if columns.start % BLOCK or columns.stop % BLOCK:
            return None
        size = BLOCK_BYTES[self.kind]
        return GgufWeight(self.kind, self.raw[:, columns.start // BLOCK * size : columns.stop // BLOCK * size])

    def dequantised(self) -> Tensor:
        """The blocks' values, float32 ``[O, I]``."""
        blocks_OBY = self.raw.reshape(len(self.raw), -1, BLOCK_BYTES[self.kind])
        scale_OB1 = _float16(blocks_OBY, 0)
        if self.kind == "Q8_0":
            return (scale_OB1 * blocks_OBY[..., 2:].view(torch.int8)).flatten(1)
        if self.kind == "Q4_0":
            return (scale_OB1 * (_nibbles(blocks_OBY[..., 2:]) - 8)).flatten(1)
        return (scale_OB1 * _nibbles(blocks_OBY[..., 4:]) + _float16(blocks_OBY, 2)).flatten(1)


def join(parts: Sequence[GgufWeight]) -> GgufWeight | None:
    """Matrices over the same inputs, one below the other; None if their block types differ."""
    if len({part.kind for part in parts}) > 1:
        return None
    return GgufWeight(parts[0].kind, torch.cat([part.raw for part in parts]))


def quantise_and_dequantise(x_NI: Tensor, activation_bits: int) -> Tensor:
    """``x`` as ``GgufMatrix`` quantises it, float32 ``[N, I]``: integers times a scale for each 32 elements."""
    most = ACTIVATION_LIMITS[activation_bits]
    x_NB32 = x_NI.float().unflatten(1, (-1, BLOCK))
    largest_NB1 = x_NB32.abs().amax(dim=2, keepdim=True)
    # torch would compute number / tensor as number * (1 / tensor), which rounds twice.
    factor_NB1 = torch.where(largest_NB1 > 0, torch.full_like(largest_NB1, most) / largest_NB1, 0)
    rounded_NB32: Tensor = (x_NB32 * factor_NB1).round() * (largest_NB1 / most)
    return rounded_NB32.flatten(1)


def _float16(blocks_OBY: Tensor, first: int) -> Tensor:
    return blocks_OBY[..., first : first + 2].contiguous().view(torch.float16).float()


def _nibbles(bytes_OB16: Tensor) -> Tensor:
    """The bytes' low halves, then their high halves, float32."""
    return torch.cat((bytes_OB16 & 15, bytes_OB16 >> 4), dim=-1).float()
