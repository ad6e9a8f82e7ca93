"""Latents into pages and out of them, in the pages' own numbers.

Shapes: N pages of P tokens, C numbers cached of a token, T tokens written, I read.
"""

from __future__ import annotations

import torch
from torch import Tensor

from plait_worker.attention import LatentShape

FLOAT8 = torch.float8_e4m3fn


def store_latents(latent_TC: Tensor, pages: Tensor, place_T: Tensor, shape: LatentShape) -> None:
    """Token t goes to token ``place_T[t]`` (int64) of ``pages`` ``[N, P, C]`` seen as one row of tokens."""
    if shape.cached_dtype is not FLOAT8:
        pages.view(-1, shape.cached_dim).index_copy_(0, place_T, latent_TC)
        return
    # torch moves float8 as bytes only.
    stored_TC = to_float8(latent_TC, shape.cached_scale).view(torch.uint8)
    pages.view(torch.uint8).view(-1, shape.cached_dim).index_copy_(0, place_T, stored_TC)


def load_latents(pages: Tensor, place_I: Tensor, shape: LatentShape) -> Tensor:
    """What lies at these tokens (int64) of the pages, ``[I, C]`` in the model's dtype."""
    return as_model(pages.view(-1, shape.cached_dim).index_select(0, place_I), shape)


def as_model(cached: Tensor, shape: LatentShape) -> Tensor:
    """Numbers of the pages in the model's dtype."""
    return cached if shape.cached_dtype is not FLOAT8 else (cached.float() * shape.cached_scale).to(shape.dtype)


def to_float8(values: Tensor, scale: float = 1.0) -> Tensor:
    """The values over ``scale``, in float8 e4m3; what lies beyond its range becomes its largest number, not a NaN."""
    largest = torch.finfo(FLOAT8).max
    return (values.float() / scale).clamp(-largest, largest).to(FLOAT8)
