"""The values of 4-bit codes in Triton: a quarter of a chunk's inputs at a time.

On a GPU two codes are made bfloat16 at once: an integer below 128 in the mantissa of 128 is 128 more than itself, and
an e2m1 float is a bfloat16 of the same bits times 2 ** 126.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from plait_kernels.linear.int4 import FLOAT, Int4Weight

_INTEGERS_0: tl.constexpr = tl.constexpr("""{
    .reg .b32 code, one;
    mov.b32 one, 0x3F803F80;
    lop3.b32 code, $1, 0x000F000F, 0x43004300, 0xEA;
    fma.rn.bf16x2 $0, code, one, $2;
}""")
_INTEGERS_1: tl.constexpr = tl.constexpr("""{
    .reg .b32 code, one;
    mov.b32 one, 0x3F803F80;
    shr.b32 code, $1, 4;
    lop3.b32 code, code, 0x000F000F, 0x43004300, 0xEA;
    fma.rn.bf16x2 $0, code, one, $2;
}""")
_INTEGERS_2: tl.constexpr = tl.constexpr("""{
    .reg .b32 code, one;
    mov.b32 one, 0x3F803F80;
    shr.b32 code, $1, 8;
    lop3.b32 code, code, 0x000F000F, 0x43004300, 0xEA;
    fma.rn.bf16x2 $0, code, one, $2;
}""")
_INTEGERS_3: tl.constexpr = tl.constexpr("""{
    .reg .b32 code, one;
    mov.b32 one, 0x3F803F80;
    shr.b32 code, $1, 12;
    lop3.b32 code, code, 0x000F000F, 0x43004300, 0xEA;
    fma.rn.bf16x2 $0, code, one, $2;
}""")
_FLOATS_0: tl.constexpr = tl.constexpr("""{
    .reg .b32 size, sign, factor, none;
    mov.b32 factor, 0x7E807E80;
    mov.b32 none, 0x80008000;
    shl.b32 size, $1, 6;
    and.b32 size, size, 0x01C001C0;
    shl.b32 sign, $1, 12;
    lop3.b32 size, sign, 0x80008000, size, 0xEA;
    fma.rn.bf16x2 $0, size, factor, none;
}""")
_FLOATS_1: tl.constexpr = tl.constexpr("""{
    .reg .b32 size, sign, factor, none;
    mov.b32 factor, 0x7E807E80;
    mov.b32 none, 0x80008000;
    shl.b32 size, $1, 2;
    and.b32 size, size, 0x01C001C0;
    shl.b32 sign, $1, 8;
    lop3.b32 size, sign, 0x80008000, size, 0xEA;
    fma.rn.bf16x2 $0, size, factor, none;
}""")
_FLOATS_2: tl.constexpr = tl.constexpr("""{
    .reg .b32 size, sign, factor, none;
    mov.b32 factor, 0x7E807E80;
    mov.b32 none, 0x80008000;
    shr.b32 size, $1, 2;
    and.b32 size, size, 0x01C001C0;
    shl.b32 sign, $1, 4;
    lop3.b32 size, sign, 0x80008000, size, 0xEA;
    fma.rn.bf16x2 $0, size, factor, none;
}""")
_FLOATS_3: tl.constexpr = tl.constexpr("""{
    .reg .b32 size, factor, none;
    mov.b32 factor, 0x7E807E80;
    mov.b32 none, 0x80008000;
    shr.b32 size, $1, 6;
    and.b32 size, size, 0x01C001C0;
    lop3.b32 size, $1, 0x80008000, size, 0xEA;
    fma.rn.bf16x2 $0, size, factor, none;
}""")


def coding(weight: Int4Weight, like: Tensor) -> dict[str, int | bool]:
    """What the kernels must know of a weight's codes, for rows such as ``like``."""
    return {
        "NUM_INPUTS": weight.num_inputs,
        "NUM_CHUNKS": weight.codes.shape[-4],
        "GROUP": weight.group_size,
        "HAS_ZERO": weight.zero is not None,
        "IS_FLOAT": weight.kind == FLOAT,
        "PAIRS": like.is_cuda and like.dtype == torch.bfloat16,
    }


def zeros_of(weight: Int4Weight) -> Tensor:
    """A pointer for the kernels, which read it only with ``HAS_ZERO``."""
    return weight.scale if weight.zero is None else weight.zero


@triton.jit
def plane_values(  # type: ignore[no-untyped-def]
    words, less, QUARTER: tl.constexpr, IS_FLOAT: tl.constexpr, PAIRS: tl.constexpr, dtype: tl.constexpr
):
    """The values of a quarter's codes; ``less``, of the same shape, is minus the zero, and 128 less with ``PAIRS``."""
    if PAIRS:
        if IS_FLOAT:
            if QUARTER == 0:
                value = tl.inline_asm_elementwise(_FLOATS_0, "=r,r", [words], tl.bfloat16, is_pure=True, pack=2)
            elif QUARTER == 1:
                value = tl.inline_asm_elementwise(_FLOATS_1, "=r,r", [words], tl.bfloat16, is_pure=True, pack=2)
            elif QUARTER == 2:
                value = tl.inline_asm_elementwise(_FLOATS_2, "=r,r", [words], tl.bfloat16, is_pure=True, pack=2)
            else:
                value = tl.inline_asm_elementwise(_FLOATS_3, "=r,r", [words], tl.bfloat16, is_pure=True, pack=2)
        elif QUARTER == 0:
            value = tl.inline_asm_elementwise(_INTEGERS_0, "=r,r,r", [words, less], tl.bfloat16, is_pure=True, pack=2)
        elif QUARTER == 1:
            value = tl.inline_asm_elementwise(_INTEGERS_1, "=r,r,r", [words, less], tl.bfloat16, is_pure=True, pack=2)
        elif QUARTER == 2:
            value = tl.inline_asm_elementwise(_INTEGERS_2, "=r,r,r", [words, less], tl.bfloat16, is_pure=True, pack=2)
        else:
            value = tl.inline_asm_elementwise(_INTEGERS_3, "=r,r,r", [words, less], tl.bfloat16, is_pure=True, pack=2)
        return value
    code = (words >> 4 * QUARTER) & 15
    return (value_of(code) if IS_FLOAT else code.to(tl.float32) + less).to(dtype)


@triton.jit
def places_of(codes_ptr, first, num_outputs, TILES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where the words of ``TILES`` tiles of 16 outputs from ``first`` on are, ``[64 TILES, 8]``.

    Also which of them there are, and the words of a chunk.
    """
    thread = tl.arange(0, 64 * TILES)
    half, tile = thread // (32 * TILES), first + thread // 32 % TILES
    size = num_outputs.to(tl.int64) * 32
    thread_at = half * (size // 2) + tile * 256 + thread % 32 * 8
    return codes_ptr + thread_at[:, None] + tl.arange(0, 8)[None, :], (tile * 16 < num_outputs)[:, None], size


@triton.jit
def in_order(places, TILES: tl.constexpr):  # type: ignore[no-untyped-def]
    """``[OUTPUTS, 32]``, of what is in the order of the words."""
    parts = tl.reshape(places, [2, TILES, 8, 4, 2, 2, 2])
    return tl.reshape(tl.permute(parts, [1, 5, 2, 0, 4, 3, 6]), [16 * TILES, 32])


@triton.jit
def in_places(values, TILES: tl.constexpr):  # type: ignore[no-untyped-def]
    """In the order of the words, what holds for each output."""
    parts = tl.permute(tl.reshape(values, [1, TILES, 2, 8, 1, 1, 1]), [0, 1, 3, 4, 5, 2, 6])
    return tl.reshape(tl.broadcast_to(parts, [2, TILES, 8, 4, 2, 2, 2]), [64 * TILES, 8])


@triton.jit
def value_of(code):  # type: ignore[no-untyped-def]
    """Of an e2m1 float."""
    size = code & 7
    doubled = tl.where(size < 4, size, (2 + (size & 1)) << tl.maximum((size >> 1) - 1, 0)).to(tl.float32)
    return tl.where(code < 8, doubled, -doubled) / 2
