"""Matrices of small integers with a scale for each group of inputs, and the GGUF blocks that hold them exactly.

Shapes: O outputs, I inputs, G groups of a row, R outputs of a slab, B blocks of 32 inputs of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from plait_kernels.linear import BlockWeight, Int4Weight
from plait_kernels.linear.int4 import FLOAT, INTEGER, pack_int4
from torch import Tensor

BLOCK = 32
"""Inputs of a GGUF block."""
_SLAB = 256
"""Outputs upcast at a time."""


@dataclass(frozen=True, slots=True)
class ScaledIntegers:
    """A matrix whose elements are ``(quant - zero) * scale``."""

    quant_OI: Tensor
    """uint8."""
    zero_OG: Tensor
    """int16."""
    scale_OG: Tensor
    """float32."""
    group_I: Tensor | None = None
    """The group of each input; None if groups are runs of one length."""
    is_float: bool = False
    """Whether they are twice an e2m1 value, as ``FLOATS``, for scales of half the size."""

    def dequantised(self) -> Tensor:
        """float32 ``[O, I]``, rounded once."""
        out_OI = torch.empty(self.quant_OI.shape)
        for rows in self._slabs():
            torch.mul(self._centred(rows), self._of_inputs(self.scale_OG[rows]), out=out_OI[rows])
        return out_OI

    def mean_integer(self) -> float:
        """The median of the groups' means."""
        order_I = torch.arange(self.quant_OI.shape[1]) if self.group_I is None else self.group_I.argsort(stable=True)
        runs_OGI = self.quant_OI[:, order_I].unflatten(1, (self.scale_OG.shape[1], -1))
        return float((runs_OGI.float().mean(2) - self.zero_OG).median())

    def blocks(self, kind: str) -> BlockWeight:
        """The same values in blocks of a ``BLOCK_KINDS``; scales are rounded to float16.

        Groups must be runs of a multiple of 32 inputs.
        """
        pack = _PACKERS[kind]
        parts = [self._packed(rows, pack) for rows in self._slabs()]
        return BlockWeight(kind, torch.cat(parts))

    def int4(self) -> Int4Weight | None:
        """The same as 4-bit codes; None if the kernels do not take them. Quants must be below 16, or floats."""
        if self.is_float:
            codes_OI = _CODES[self.quant_OI.long()]
            return pack_int4(codes_OI, (2 * self.scale_OG).bfloat16(), None, FLOAT, self.group_I)
        return pack_int4(self.quant_OI, _smallest(self.scale_OG), self.zero_OG, INTEGER, self.group_I)

    def _packed(self, rows: slice, pack: Callable[[Tensor], Tensor]) -> Tensor:
        quant_RB32 = self._centred(rows).unflatten(1, (-1, BLOCK))
        scale_RG = self.scale_OG[rows].half()
        scale_RB = scale_RG.repeat_interleave(quant_RB32.shape[1] // scale_RG.shape[1], dim=1)
        return torch.cat((scale_RB[..., None].view(torch.uint8), pack(quant_RB32)), dim=2).flatten(1)

    def _slabs(self) -> Iterator[slice]:
        return (slice(first, first + _SLAB) for first in range(0, self.quant_OI.shape[0], _SLAB))

    def _centred(self, rows: slice) -> Tensor:
        """int16 ``[R, I]``."""
        return self.quant_OI[rows].to(torch.int16) - self._of_inputs(self.zero_OG[rows])

    def _of_inputs(self, values_RG: Tensor) -> Tensor:
        """``[R, I]``, from what holds for each group."""
        if self.group_I is not None:
            return values_RG[:, self.group_I]
        return values_RG.repeat_interleave(self.quant_OI.shape[1] // values_RG.shape[1], dim=1)


FLOAT_MIDDLE = 16
"""The zero of floats."""
FLOATS = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=torch.int8)
"""Twice the e2m1 value of each code."""
_CODES = torch.zeros(2 * FLOAT_MIDDLE, dtype=torch.uint8)
"""The code of each quant; 0 and -0 are one number."""
_CODES[FLOATS[1:8].long() + FLOAT_MIDDLE] = torch.arange(1, 8, dtype=torch.uint8)
_CODES[FLOATS[9:].long() + FLOAT_MIDDLE] = torch.arange(9, 16, dtype=torch.uint8)


def _smallest(scale_OG: Tensor) -> Tensor:
    """In the smallest type that holds them exactly."""
    narrow = (scale_OG.to(dtype) for dtype in (torch.float16, torch.bfloat16))
    return next((each for each in narrow if torch.equal(each.float(), scale_OG)), scale_OG)


def block_kind(bits: int, *, is_symmetric: bool) -> str | None:
    """The smallest blocks that hold integers of so many bits exactly, less their zero; None if there are none."""
    if bits == 4:
        return "Q4_0" if is_symmetric else "Q5_0"
    return "Q8_0" if is_symmetric else None


def unpack(words: Tensor, bits: int) -> Tensor:
    """uint8 ``[..., 32 / bits W]`` of int32 ``[..., W]``: 4 or 8 bits each, the lowest first."""
    # A copy: a side of one element may have any stride, which a view as bytes refuses.
    bytes_ = words.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    return bytes_ if bits == 8 else unpack_nibbles(bytes_)


def unpack_nibbles(bytes_: Tensor) -> Tensor:
    """uint8 ``[..., 2 X]`` of uint8 ``[..., X]``, the low four bits first."""
    return torch.stack((bytes_ & 15, bytes_ >> 4), dim=-1).flatten(-2)


def _nibbles(quant_RB32: Tensor) -> Tensor:
    """Low halves of 16 bytes, then their high halves."""
    low, high = (quant_RB32 & 15).to(torch.uint8).chunk(2, dim=2)
    return low | high << 4


def _pack_q4_0(quant_RB32: Tensor) -> Tensor:
    return _nibbles(quant_RB32 + 8)


def _pack_q5_0(quant_RB32: Tensor) -> Tensor:
    """The fifth bits of all 32 before the others."""
    shifted = quant_RB32 + 16
    bits = (shifted >> 4).to(torch.uint8).unflatten(2, (4, 8)) << torch.arange(8, dtype=torch.uint8)
    return torch.cat((bits.sum(dim=3, dtype=torch.uint8), _nibbles(shifted)), dim=2)


def _pack_q8_0(quant_RB32: Tensor) -> Tensor:
    return quant_RB32.to(torch.int8).view(torch.uint8)


_PACKERS = {"Q4_0": _pack_q4_0, "Q5_0": _pack_q5_0, "Q8_0": _pack_q8_0}
BLOCK_KINDS = frozenset(_PACKERS)
