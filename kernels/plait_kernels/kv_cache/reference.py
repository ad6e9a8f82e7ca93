"""Writing to pages in torch.

Shapes: T tokens, R rows, W pages in the widest table, G key-value heads, D numbers in a head, N pages of P tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
_LARGEST = torch.finfo(FP8).max


class PageScales(NamedTuple):
    """What a number in the pages stands for, over the number itself; other than 1 only in float8."""

    k: float = 1.0
    v: float = 1.0


UNSCALED = PageScales()


def store(k_TGD: Tensor, v_TGD: Tensor, pages: Tensor, slot_mapping_T: Tensor, scales: PageScales) -> None:
    """See ``plait_kernels.kv_cache.store``."""
    page_size = pages.shape[3]
    page_T, offset_T = slot_mapping_T // page_size, slot_mapping_T % page_size
    numbers = as_bytes(pages)
    numbers[page_T, 0, :, offset_T] = as_bytes(stored(k_TGD, pages.dtype, scales.k))
    numbers[page_T, 1, :, offset_T] = as_bytes(stored(v_TGD, pages.dtype, scales.v))


def slot_mapping(table_RW: Tensor, row_T: Tensor | None, positions_T: Tensor, page_size: int) -> Tensor:
    """See ``plait_kernels.kv_cache.slot_mapping``."""
    row_T = torch.arange(len(table_RW), device=positions_T.device) if row_T is None else row_T
    return table_RW[row_T, positions_T // page_size].long() * page_size + positions_T % page_size


def stored(values: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    """The values as pages of this dtype keep them: in float8 divided by the scale, and no larger than it holds."""
    return (values.float() / scale).clamp(-_LARGEST, _LARGEST).to(FP8) if dtype == FP8 else values


def as_bytes(numbers: Tensor) -> Tensor:
    """Float8 as bytes, which torch can index; anything else as it is."""
    return numbers.view(torch.uint8) if numbers.dtype == FP8 else numbers
