"""The paged key-value cache of one rank.

Shapes: N pages and one dummy page, 2 for key and value, G key-value heads of this rank, P tokens in a
page, D numbers in a head, C numbers in a latent with its shared key.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from plait_kernels.cpu.memory import mapped
from torch import Tensor


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """What a model keeps of each token on one rank."""

    num_layers: int
    """Layers that keep keys and values."""
    num_kv_heads: int
    """G: heads of this rank."""
    head_dim: int
    """D."""
    dtype: torch.dtype
    """Of keys and values."""

    def page_shape(self, page_size: int) -> tuple[int, ...]:
        """``[2, G, P, D]``."""
        return 2, self.num_kv_heads, page_size, self.head_dim


@dataclass(frozen=True, slots=True)
class LatentCacheSpec:
    """What a model with multi-head latent attention keeps of each token: the same on every rank."""

    num_layers: int
    """Layers that keep latents."""
    cached_dim: int
    """C."""
    dtype: torch.dtype
    """Of the latents in the pages."""

    def page_shape(self, page_size: int) -> tuple[int, ...]:
        """``[P, C]``."""
        return page_size, self.cached_dim


AnyCacheSpec = CacheSpec | LatentCacheSpec


def bytes_per_page(spec: AnyCacheSpec, page_size: int) -> int:
    """Bytes of one page over all layers; ``page_size`` in tokens."""
    return spec.num_layers * math.prod(spec.page_shape(page_size)) * spec.dtype.itemsize


class KVCache:
    """The pages of every layer; page ``num_pages`` is the dummy that padded tables point at."""

    def __init__(self, spec: AnyCacheSpec, num_pages: int, page_size: int, device: torch.device) -> None:
        """Allocate the pool, zero-filled: a masked probability of 0 times a NaN left in memory is NaN."""
        self.spec = spec
        self.num_pages = num_pages
        self.page_size = page_size
        shape = (num_pages + 1, *spec.page_shape(page_size))
        self.layers: list[Tensor] = [_zeros(shape, spec.dtype, device) for _ in range(spec.num_layers)]
        """One tensor ``[N + 1, 2, G, P, D]`` or ``[N + 1, P, C]`` a layer."""

    @property
    def dummy_page(self) -> int:
        """Index of the page outside the pool."""
        return self.num_pages


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on a CPU mapped, for writing them over a pool of 4 GiB takes seconds and memory that most never use."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    return mapped(num_bytes)[:num_bytes].view(dtype).view(shape)
