"""A step's rotation tables in Triton: a program takes one token; one kernel where torch takes nine.

Shapes: T tokens, F frequencies, D = 2 F.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def rope_tables(positions_T: Tensor, frequencies_F: Tensor, scale: float | Tensor = 1.0) -> tuple[Tensor, Tensor]:
    """See ``plait_kernels.rope.rope_tables``; all contiguous."""
    num_tokens, num = positions_T.shape[0], frequencies_F.shape[0]
    cos_T1D = torch.empty(num_tokens, 1, 2 * num, dtype=torch.float32, device=positions_T.device)
    sin_T1D = torch.empty_like(cos_T1D)
    is_each = isinstance(scale, Tensor)
    if num_tokens:
        _rope_tables_kernel[(num_tokens,)](
            positions_T,
            frequencies_F,
            scale if is_each else frequencies_F,
            1.0 if is_each else scale,
            cos_T1D,
            sin_T1D,
            NUM=num,
            BLOCK=triton.next_power_of_2(num),
            HAS_SCALES=is_each,
            num_warps=1,
        )
    return cos_T1D, sin_T1D


@triton.jit(do_not_specialize_on_alignment=["positions_ptr"])
def _rope_tables_kernel(  # type: ignore[no-untyped-def]
    positions_ptr,
    frequencies_ptr,
    scales_ptr,
    scale,
    cos_ptr,
    sin_ptr,
    NUM: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_SCALES: tl.constexpr,
):
    token, index = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    is_there = index < NUM
    if HAS_SCALES:
        scale = tl.load(scales_ptr + index, mask=is_there, other=0.0)
    angle = tl.load(positions_ptr + token).to(tl.float32) * tl.load(frequencies_ptr + index, mask=is_there, other=0.0)
    cosine, sine = tl.cos(angle) * scale, tl.sin(angle) * scale
    first = token * 2 * NUM + index
    tl.store(cos_ptr + first, cosine, mask=is_there)
    tl.store(cos_ptr + first + NUM, cosine, mask=is_there)
    tl.store(sin_ptr + first, -sine, mask=is_there)
    tl.store(sin_ptr + first + NUM, sine, mask=is_there)
