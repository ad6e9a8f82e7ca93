"""The values of a GGUF's blocks: what the kernels compute with, and what their tests compare with.

https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h

Shapes: O outputs, B blocks of a row, Y bytes of a block.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def block_values(kind: str, blocks_OBY: Tensor) -> Tensor:
    """float32 ``[O, B, inputs of a block]`` of uint8 ``[O, B, Y]``; ``kind`` is one of ``blocks.KINDS``."""
    return _VALUES[kind](blocks_OBY)


def _q4_0(x: Tensor) -> Tensor:
    return _float16(x, 0) * (_nibbles(x[..., 2:]) - 8)


def _q4_1(x: Tensor) -> Tensor:
    return _float16(x, 0) * _nibbles(x[..., 4:]) + _float16(x, 2)


def _q5_0(x: Tensor) -> Tensor:
    return _float16(x, 0) * (_nibbles(x[..., 6:]) + 16 * _fifth_bits(x[..., 2:6]) - 16)


def _q5_1(x: Tensor) -> Tensor:
    return _float16(x, 0) * (_nibbles(x[..., 8:]) + 16 * _fifth_bits(x[..., 4:8])) + _float16(x, 2)


def _q8_0(x: Tensor) -> Tensor:
    return _float16(x, 0) * x[..., 2:].contiguous().view(torch.int8)


def _q4_k(x: Tensor) -> Tensor:
    return _of_k_blocks(x, _k_nibbles(x[..., 16:144]))


def _q5_k(x: Tensor) -> Tensor:
    bits = torch.stack([x[..., 16:48] >> block & 1 for block in range(8)], dim=-2)
    return _of_k_blocks(x, _k_nibbles(x[..., 48:176]) + 16 * bits)


def _q6_k(x: Tensor) -> Tensor:
    low, high = x[..., :128].unflatten(-1, (2, 2, 32)), x[..., 128:192].unflatten(-1, (2, 1, 32))
    quants = torch.cat((low & 15, low >> 4), dim=-2)
    bits = torch.cat([high >> 2 * block & 3 for block in range(4)], dim=-2)
    whole = (quants + 16 * bits).float().flatten(-3).unflatten(-1, (16, 16)) - 32
    scales = x[..., 192:208].contiguous().view(torch.int8).float()
    values: Tensor = (_float16(x, 208) * scales)[..., None] * whole
    return values.flatten(-2)


def _of_k_blocks(x: Tensor, quants: Tensor) -> Tensor:
    """Eight blocks of 32 with scales and minima of 6 bits: the first four of each in the low bits of bytes 4 to 12."""
    first, second, rest = x[..., 4:8], x[..., 8:12], x[..., 12:16]
    scales = torch.cat((first & 63, (rest & 15) | (first >> 6 << 4)), dim=-1)
    minima = torch.cat((second & 63, (rest >> 4) | (second >> 6 << 4)), dim=-1)
    values: Tensor = (_float16(x, 0) * scales)[..., None] * quants - (_float16(x, 2) * minima)[..., None]
    return values.flatten(-2)


def _k_nibbles(x: Tensor) -> Tensor:
    """Low halves of 32 bytes, then their high halves, four times: ``[..., 8, 32]``."""
    pairs = x.unflatten(-1, (4, 1, 32))
    return torch.cat((pairs & 15, pairs >> 4), dim=-2).flatten(-3, -2)


def _float16(x: Tensor, first: int) -> Tensor:
    return x[..., first : first + 2].contiguous().view(torch.float16).float()


def _nibbles(x: Tensor) -> Tensor:
    """Low halves of 16 bytes, then their high halves, float32."""
    return torch.cat((x & 15, x >> 4), dim=-1).float()


def _fifth_bits(x: Tensor) -> Tensor:
    """Bit i of 32, in four bytes."""
    return (x[..., None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten(-2).float()


_VALUES: dict[str, Callable[[Tensor], Tensor]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
