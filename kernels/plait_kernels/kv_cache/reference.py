"""Cache writes in torch.

Shapes: T tokens, R rows, W pages in the widest table, G key-value heads, D dims of a head, N pages of P tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
_LARGEST = torch.finfo(FP8).max


class PageScales(NamedTuple):
    """FP8 KV scales (value = stored * scale); 1 for other dtypes."""

    k: float = 1.0
    v: float = 1.0


UNSCALED = PageScales()


def store(k_TGD: Tensor, v_TGD: Tensor, pages: Tensor, slot_mapping_T: Tensor, scales: PageScales) -> None:
    """See ``plait_kernels.kv_cache.store``."""
    page_size = pages.shape[3]
    page_T, offset_T = slot_mapping_T // page_size, slot_mapping_T % page_size
    raw = as_bytes(pages)
    raw[page_T, 0, :, offset_T] = as_bytes(to_cache_dtype(k_TGD, pages.dtype, scales.k))
    raw[page_T, 1, :, offset_T] = as_bytes(to_cache_dtype(v_TGD, pages.dtype, scales.v))


def slot_mapping(table_RW: Tensor, row_T: Tensor | None, positions_T: Tensor, page_size: int) -> Tensor:
    """See ``plait_kernels.kv_cache.slot_mapping``."""
    row_T = torch.arange(len(table_RW), device=positions_T.device) if row_T is None else row_T
    return table_RW[row_T, positions_T // page_size].long() * page_size + positions_T % page_size


def to_cache_dtype(values: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    """The values as pages of this dtype store them: for float8 divided by the scale and clamped."""
    return (values.float() / scale).clamp(-_LARGEST, _LARGEST).to(FP8) if dtype == FP8 else values


def as_bytes(pages: Tensor) -> Tensor:
    """A float8 tensor as bytes, which torch can index; any other unchanged."""
    return pages.view(torch.uint8) if pages.dtype == FP8 else pages
