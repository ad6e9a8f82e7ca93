"""FP8 (e4m3) weights that stay FP8, the FP8 rows they are multiplied by, and what both stand for.

Weights have a scale for each block of 128 x 128 elements (DeepSeek-V3, arXiv 2412.19437, section 3.3.2) or for each
output. Rows get theirs as they are computed: one for each 128 elements, or one for a row.

Shapes: N rows, I inputs, O outputs, G groups of 128 inputs, B blocks of outputs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

GROUP = 128
"""Inputs with one scale."""
LARGEST = 448.0
"""Of e4m3."""
LEAST = 2.0**-119
"""Elements whose largest is less are zeros: the factor that makes it `LARGEST` is more than float32 holds."""
FP8 = torch.float8_e4m3fn
ROWS_MULTIPLE = 4
"""Of rows with grouped scales, for cuBLASLt, which reads scales by 16 bytes."""
MULTIPLE = 16
"""Of inputs and outputs, for the tensor cores."""
MAX_FAST_INPUTS = 4096
"""Sums over so many inputs lose up to 0.7% of the largest output in the tensor cores' own accumulators, measured on
an H200; rounding one value to FP8 loses up to 6%. Longer ones are added in float32."""


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """A matrix: an element is what is stored times its scale."""

    stored_OI: Tensor
    """e4m3."""
    scale: Tensor
    """float32: ``[O]``, or ``[B, G]`` of blocks."""
    block_rows: int = 0
    """Outputs of a block, a divisor of 128; 0 if each output has a scale."""

    @property
    def shape(self) -> tuple[int, int]:
        """``(O, I)``."""
        num_outputs, num_inputs = self.stored_OI.shape
        return num_outputs, num_inputs

    @property
    def nbytes(self) -> int:
        """Of elements and scales."""
        return self.stored_OI.nbytes + self.scale.nbytes

    def one(self, index: int) -> Fp8Weight:
        """A matrix of a stack of experts, whose tensors have one more dimension in front."""
        return Fp8Weight(self.stored_OI[index], self.scale[index], self.block_rows)

    def rows(self, rows: range) -> Fp8Weight:
        """Some outputs; blocks that they cut become smaller ones."""
        stored_OI = self.stored_OI[rows.start : rows.stop]
        if not self.block_rows:
            return Fp8Weight(stored_OI, self.scale[rows.start : rows.stop])
        block_rows = math.gcd(self.block_rows, rows.start)
        scale_BG = self.scale.repeat_interleave(self.block_rows // block_rows, dim=0)
        return Fp8Weight(stored_OI, scale_BG[rows.start // block_rows : -(-rows.stop // block_rows)], block_rows)

    def columns(self, columns: range) -> Fp8Weight | None:
        """Some inputs; None if they begin or end within a block."""
        num_inputs = self.shape[1]
        if not self.block_rows:
            return Fp8Weight(self.stored_OI[:, columns.start : columns.stop], self.scale)
        if columns.start % GROUP or (columns.stop % GROUP and columns.stop != num_inputs):
            return None
        scale_BG = self.scale[:, columns.start // GROUP : -(-columns.stop // GROUP)]
        return Fp8Weight(self.stored_OI[:, columns.start : columns.stop], scale_BG, self.block_rows)

    def to(self, device: torch.device) -> Fp8Weight:
        """A contiguous copy."""
        stored_OI = torch.empty(self.stored_OI.shape, dtype=FP8, device=device).copy_(self.stored_OI)
        scale = torch.empty(self.scale.shape, dtype=torch.float32, device=device).copy_(self.scale)
        return Fp8Weight(stored_OI, scale, self.block_rows)

    def with_block_rows(self, block_rows: int) -> Fp8Weight:
        """The same in blocks of fewer outputs."""
        num_blocks = -(-self.shape[0] // block_rows)
        scale_BG = self.scale.repeat_interleave(self.block_rows // block_rows, dim=0)[:num_blocks]
        return Fp8Weight(self.stored_OI, scale_BG, block_rows)

    def dequantised(self) -> Tensor:
        """float32 ``[O, I]``."""
        num_outputs, num_inputs = self.shape
        if not self.block_rows:
            return self.stored_OI.float() * self.scale[:, None]
        scale_BI = self.scale.repeat_interleave(GROUP, dim=1)[:, :num_inputs]
        return self.stored_OI.float() * scale_BI.repeat_interleave(self.block_rows, dim=0)[:num_outputs]


@dataclass(frozen=True, slots=True)
class Fp8Rows:
    """Quantised activations."""

    stored_NI: Tensor
    """e4m3."""
    scale: Tensor
    """float32: ``[N, 1]``, or ``[N, G]``, columns contiguous."""

    def in_fours(self) -> Fp8Rows:
        """With as many more rows, of any value, as make a multiple of four; kernels leave room for them."""
        (num_rows, num_inputs), num_groups = self.stored_NI.shape, self.scale.shape[1]
        whole = -(-num_rows // ROWS_MULTIPLE) * ROWS_MULTIPLE
        stored_NI = self.stored_NI.as_strided((whole, num_inputs), self.stored_NI.stride())
        return Fp8Rows(stored_NI, self.scale.as_strided((whole, num_groups), self.scale.stride()))

    def dequantised(self) -> Tensor:
        """float32 ``[N, I]``."""
        size = GROUP if self.scale.shape[1] > 1 else self.stored_NI.shape[1]
        scale_NI = self.scale.repeat_interleave(size, dim=1)[:, : self.stored_NI.shape[1]]
        return self.stored_NI.float() * scale_NI


def join(parts: Sequence[Fp8Weight]) -> Fp8Weight | None:
    """Matrices over the same inputs, one below the other; None if only some have blocks."""
    if len(parts) == 1:
        return parts[0]
    if len({bool(part.block_rows) for part in parts}) > 1:
        return None
    stored_OI = torch.cat([part.stored_OI.view(torch.uint8) for part in parts]).view(FP8)
    if not parts[0].block_rows:
        return Fp8Weight(stored_OI, torch.cat([part.scale for part in parts]))
    block_rows = math.gcd(*(part.block_rows for part in parts), *(part.shape[0] for part in parts[:-1]))
    return Fp8Weight(stored_OI, torch.cat([part.with_block_rows(block_rows).scale for part in parts]), block_rows)


def quantise_outputs(weight_OI: Tensor) -> Fp8Weight:
    """A matrix with a scale for each output, so that its largest element is e4m3's."""
    stored_OI, scale_O1 = _quantise(weight_OI.float())
    return Fp8Weight(stored_OI, scale_O1[:, 0])


def quantise_blocks(weight_OI: Tensor) -> Fp8Weight:
    """A matrix with a scale for each block of 128 x 128."""
    num_outputs, num_inputs = weight_OI.shape
    padding = (0, -num_inputs % GROUP, 0, -num_outputs % GROUP)
    blocks = torch.nn.functional.pad(weight_OI.float(), padding).unflatten(0, (-1, GROUP)).unflatten(2, (-1, GROUP))
    stored, scale = _quantise(blocks.transpose(1, 2).flatten(2))
    stored_OI = stored.view(torch.uint8).unflatten(2, (GROUP, GROUP)).transpose(1, 2).flatten(2).flatten(0, 1)
    return Fp8Weight(stored_OI[:num_outputs, :num_inputs].contiguous().view(FP8), scale[..., 0].contiguous(), GROUP)


def quantise_rows(x_NI: Tensor, *, is_grouped: bool) -> Fp8Rows:
    """Activations as kernels quantise them; a row of zeros has scale 0."""
    if not is_grouped:
        return Fp8Rows(*_quantise(x_NI.float()))
    num_inputs = x_NI.shape[1]
    padded_NI = torch.nn.functional.pad(x_NI.float(), (0, -num_inputs % GROUP))
    stored, scale = _quantise(padded_NI.unflatten(1, (-1, GROUP)))
    return Fp8Rows(stored.flatten(1)[:, :num_inputs].contiguous(), scale[..., 0].t().contiguous().t())


def _quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3, and float32 scales over the last dimension, which becomes 1."""
    largest = x.abs().amax(dim=-1, keepdim=True)
    factor = torch.where(largest < LEAST, 0.0, LARGEST / largest)
    return (x * factor).to(FP8), largest / LARGEST
