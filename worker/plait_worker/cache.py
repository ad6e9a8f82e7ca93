"""The paged key-value cache of one rank.

Shapes: N pages and one dummy page, 2 for key and value, G key-value heads of this rank, P tokens in a
page, D numbers in a head, C numbers in a latent with its shared key.
"""

from __future__ import annotations

import math
import mmap
from contextlib import suppress
from dataclasses import dataclass

import torch
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
    """Zeros; on a CPU the kernel hands them out page by page as they are first touched.

    Writing zeros over a pool of 4 GiB takes seconds, and memory that most servers never use.
    A layer's pool is not moved to where a huge page begins: if all were, they would reach their next ones in the same
    step, which for 30 layers of 2 MiB takes 130 ms.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # some kernels have no huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)  # attention reads all over the pool: fewer translations to look up
    return torch.frombuffer(memory, dtype=dtype).view(shape)
