"""4-bit weights that stay so on a GPU, in the order in which our kernels read them, and what they stand for.

Codes are integers less a zero (AWQ, GPTQ, compressed-tensors) or e2m1 floats (MXFP4, OCP Microscaling Formats 1.0). A
scale holds for a group of inputs of one output.

Inputs come in chunks of 128. A word of 16 bits has an input of each quarter of its chunk, so that shifting words by
four bits gives 32 neighbours. The words of 16 outputs and 16 inputs of a quarter lie as the tensor cores' left operand
wants them in registers (PTX, "Matrix fragments for wgmma.mma_async.m64nNk16"): a thread reads its 8 words at once.

Shapes: N rows, I inputs, O outputs, C chunks, G groups, W = 32 words of a chunk.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

CHUNK = 128
"""Inputs that are stored together."""
WORDS = 32
"""Of an output's chunk."""
LEAST_GROUP = 32
"""Inputs of the smallest group: a quarter of a chunk."""
MULTIPLE = 16
"""Of outputs, for the tensor cores."""
MIDDLE = 8
"""The zero of symmetric integers."""
INTEGER, FLOAT = "int4", "mxfp4"
"""What codes are: integers, or e2m1 floats."""
_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice the e2m1 value of each code."""
_NIBBLES = 4
"""Of a word."""


@dataclass(frozen=True, slots=True)
class Int4Weight:
    """A matrix: an element is its code's value, less the zero of its group, times the scale of its group."""

    codes: Tensor
    """int16 ``[C, 2, O / 16, 256]``; a stack of experts has one more dimension in front of each."""
    scale: Tensor
    """float16, bfloat16 or float32 ``[G, O]``."""
    zero: Tensor | None
    """uint8 ``[G, O]``; None if it is ``MIDDLE`` everywhere, or if codes are floats."""
    num_inputs: int
    """Of the matrix; the last chunk may have more, of any value."""
    group_size: int
    """Inputs: 32, 64, a multiple of 128, or all."""
    kind: str = INTEGER
    order_I: Tensor | None = None
    """The matrix's input that is stored at each place; None if they are in order."""

    @property
    def shape(self) -> tuple[int, int]:
        """``(O, I)``."""
        return self.codes.shape[-2] * MULTIPLE, self.num_inputs

    @property
    def nbytes(self) -> int:
        """Of all tensors."""
        return sum(each.nbytes for each in (self.codes, self.scale, self.zero, self.order_I) if each is not None)

    def one(self, index: int) -> Int4Weight:
        """A matrix of a stack."""
        zero = None if self.zero is None else self.zero[index]
        return replace(self, codes=self.codes[index], scale=self.scale[index], zero=zero)

    def rows(self, rows: range) -> Int4Weight | None:
        """Some outputs; None if they begin or end within 16."""
        if rows.start % MULTIPLE or rows.stop % MULTIPLE:
            return None
        tiles = slice(rows.start // MULTIPLE, rows.stop // MULTIPLE)
        return self._with_outputs(self.codes[..., tiles, :], slice(rows.start, rows.stop))

    def reordered(self, order_O: Tensor) -> Int4Weight:
        """The outputs in another order."""
        codes_OI = _codes_in_order(self.codes, self.codes.shape[0] * CHUNK)
        return self._with_outputs(_stored(codes_OI[order_O]), order_O)

    def columns(self, columns: range) -> Int4Weight | None:
        """Some inputs; None if they begin or end within a group, or if inputs are stored in another order."""
        step = self.group_size
        if len(columns) == self.num_inputs:
            return self
        ends = columns.stop % step and columns.stop != self.num_inputs
        if self.order_I is not None or (step < self.num_inputs and (columns.start % step or ends)):
            return None
        if columns.start % LEAST_GROUP or len(columns) % LEAST_GROUP:
            return None
        codes_OI = _codes_in_order(self.codes, self.num_inputs)[:, columns.start : columns.stop]
        if step >= self.num_inputs:
            return self._replaced(_stored(codes_OI), slice(None), len(columns), len(columns))
        groups = slice(columns.start // step, -(-columns.stop // step))
        return self._replaced(_stored(codes_OI), groups, len(columns), step)

    def to(self, device: torch.device) -> Int4Weight:
        """A contiguous copy."""
        codes, scale = (each.contiguous().to(device, copy=True) for each in (self.codes, self.scale))
        zero, order_I = (
            None if each is None else each.contiguous().to(device, copy=True) for each in (self.zero, self.order_I)
        )
        return replace(self, codes=codes, scale=scale, zero=zero, order_I=order_I)

    def dequantised(self) -> Tensor:
        """float32 ``[O, I]``, rounded once."""
        value_OI = self.in_stored_order()
        return value_OI if self.order_I is None else torch.empty_like(value_OI).index_copy_(1, self.order_I, value_OI)

    def in_stored_order(self) -> Tensor:
        """The same, with the inputs of ``order_I``."""
        code_OI = _codes_in_order(self.codes, self.num_inputs)
        group_I = torch.arange(self.num_inputs, device=code_OI.device) // self.group_size
        return self._values(code_OI, group_I) * self.scale.T.float()[:, group_I]

    def _values(self, code_OI: Tensor, group_I: Tensor) -> Tensor:
        if self.kind == FLOAT:
            return torch.tensor(_DOUBLED, device=code_OI.device).float()[code_OI.long()] / 2
        return code_OI.float() - (MIDDLE if self.zero is None else self.zero.T.float()[:, group_I])

    def _with_outputs(self, codes: Tensor, which: slice | Tensor) -> Int4Weight:
        zero = None if self.zero is None else self.zero[:, which]
        scale = self.scale[:, which]
        return replace(self, codes=codes, scale=scale, zero=zero)

    def _replaced(self, codes: Tensor, groups: slice, num_inputs: int, group_size: int) -> Int4Weight:
        zero = None if self.zero is None else self.zero[groups]
        return Int4Weight(codes, self.scale[groups], zero, num_inputs, group_size, self.kind)


def pack_int4(
    code_OI: Tensor,
    scale_OG: Tensor,
    zero_OG: Tensor | None,
    kind: str = INTEGER,
    group_I: Tensor | None = None,
) -> Int4Weight | None:
    """Codes (uint8, below 16), scales and zeros as a weight; ``group_I`` is each input's group if not runs of one size.

    None if a group is not 32, 64 or a multiple of 128 inputs, nor all of them, or if outputs are no multiple of 16.
    """
    num_inputs, num_groups = code_OI.shape[1], scale_OG.shape[1]
    size = num_inputs // num_groups
    order_I = None
    if group_I is not None and num_groups > 1:
        if not bool((group_I.bincount(minlength=num_groups) == size).all()):
            return None
        order_I = group_I.argsort(stable=True)
        code_OI = code_OI[:, order_I]
    if code_OI.shape[0] % MULTIPLE or not takes_groups(num_inputs, size):
        return None
    is_middle = zero_OG is None or bool((zero_OG == MIDDLE).all())
    zero = None if is_middle or zero_OG is None else zero_OG.T.to(torch.uint8).contiguous()
    return Int4Weight(_stored(code_OI), scale_OG.T.contiguous(), zero, num_inputs, size, kind, order_I)


def takes_groups(num_inputs: int, group_size: int) -> bool:
    """Whether the kernels take such groups."""
    fits = group_size in (LEAST_GROUP, 2 * LEAST_GROUP) or group_size % CHUNK == 0 or group_size == num_inputs
    return fits and num_inputs % LEAST_GROUP == 0 and num_inputs % group_size == 0


def join(parts: Sequence[Int4Weight]) -> tuple[Int4Weight, ...]:
    """Matrices over the same inputs, one below the other: as few as have one form each."""
    joined: list[Int4Weight] = []
    for part in parts:
        if joined and _are_alike(joined[-1], part):
            joined[-1] = _joined(joined[-1], part)
        else:
            joined.append(part)
    return tuple(joined)


def stack(weights: Sequence[Int4Weight]) -> Int4Weight:
    """Of matrices that are alike, whose inputs are in order."""
    has_zero = any(each.zero is not None for each in weights)
    dtype = functools.reduce(torch.promote_types, (each.scale.dtype for each in weights))
    return replace(
        weights[0],
        codes=torch.stack([each.codes for each in weights]),
        scale=torch.stack([each.scale.to(dtype) for each in weights]),
        zero=torch.stack([_zeros(each) for each in weights]) if has_zero else None,
    )


def num_bytes(shape: tuple[int, int], group_size: int, *, scale_bytes: int, has_zero: bool) -> int:
    """What a matrix takes."""
    num_outputs, num_inputs = shape
    groups = math.ceil(num_inputs / group_size)
    return num_outputs * (-(-num_inputs // CHUNK) * CHUNK // 2 + groups * (scale_bytes + has_zero))


def _are_alike(a: Int4Weight, b: Int4Weight) -> bool:
    if (a.order_I is None) != (b.order_I is None):
        return False
    same_order = a.order_I is None or b.order_I is None or torch.equal(a.order_I, b.order_I)
    return same_order and (a.group_size, a.kind) == (b.group_size, b.kind)


def _joined(a: Int4Weight, b: Int4Weight) -> Int4Weight:
    zero = None
    if a.zero is not None or b.zero is not None:
        zero = torch.cat([_zeros(a), _zeros(b)], dim=-1)
    return replace(
        a,
        codes=torch.cat([a.codes, b.codes], dim=-2),
        scale=torch.cat([a.scale, b.scale], dim=-1),
        zero=zero,
    )


def _zeros(weight: Int4Weight) -> Tensor:
    middle = torch.full(weight.scale.shape, MIDDLE, dtype=torch.uint8, device=weight.scale.device)
    return middle if weight.zero is None else weight.zero


def stored_shape(num_outputs: int, num_inputs: int) -> tuple[int, ...]:
    """Of the codes."""
    return -(-num_inputs // CHUNK), 2, num_outputs // MULTIPLE, MULTIPLE * WORDS // 2


def _stored(code_OI: Tensor) -> Tensor:
    """int16 ``[C, 2, O / 16, 256]``."""
    padded_OI = torch.nn.functional.pad(code_OI, (0, -code_OI.shape[1] % CHUNK))
    quarters = padded_OI.unflatten(1, (-1, _NIBBLES, WORDS)).to(torch.int16).unbind(2)
    words_OCW = quarters[0] | quarters[1] << 4 | quarters[2] << 8 | quarters[3] << 12
    places: Tensor = words_OCW.unflatten(0, (-1, 2, 8)).unflatten(4, (2, 2, 4, 2))
    return places.permute(3, 4, 0, 2, 6, 5, 1, 7).flatten(3).contiguous()


def _codes_in_order(codes: Tensor, num_inputs: int) -> Tensor:
    """uint8 ``[O, I]``."""
    places = codes.unflatten(3, (8, 4, 2, 2, 2))
    words_OCW = places.permute(2, 6, 3, 0, 1, 5, 4, 7).flatten(4).flatten(0, 2)
    quarters = [(words_OCW >> 4 * i & 15).to(torch.uint8) for i in range(_NIBBLES)]
    return torch.stack(quarters, dim=2).flatten(1)[:, :num_inputs]
