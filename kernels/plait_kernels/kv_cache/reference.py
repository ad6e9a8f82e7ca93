"""Writing to pages in torch. Shapes: T tokens, G key-value heads, D numbers in a head, N pages of P tokens."""

from __future__ import annotations

from torch import Tensor


def store(k_TGD: Tensor, v_TGD: Tensor, pages: Tensor, place_T: Tensor) -> None:
    """See ``plait_kernels.kv_cache.store``."""
    page_size = pages.shape[3]
    page_T, offset_T = place_T // page_size, place_T % page_size
    pages[page_T, 0, :, offset_T] = k_TGD
    pages[page_T, 1, :, offset_T] = v_TGD
