"""Latents out of pages, as the model's numbers.

Shapes: N pages of P tokens, C numbers cached of a token, I tokens read.
"""

from __future__ import annotations

from plait_kernels.kv_cache import FP8, as_bytes
from torch import Tensor

from plait_worker.attention import LatentShape


def load_latents(pages: Tensor, slot_mapping_I: Tensor, shape: LatentShape) -> Tensor:
    """What lies at these tokens (int64) of ``pages`` ``[N, P, C]``, ``[I, C]`` in the model's dtype."""
    read_IC = as_bytes(pages).view(-1, shape.cached_dim).index_select(0, slot_mapping_I)
    return as_model(read_IC.view(pages.dtype), shape)


def as_model(cached: Tensor, shape: LatentShape) -> Tensor:
    """Numbers of the pages in the model's dtype."""
    return (cached.float() * shape.cached_scale).to(shape.dtype) if shape.cached_dtype == FP8 else cached
