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

_HUGE_PAGE = 1 << 21
"""What Linux maps at once where it can: 2 MiB on x86-64, and on ARM with pages of 4 KiB."""


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
class MlaCacheSpec:
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


AnyCacheSpec = CacheSpec | MlaCacheSpec


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
        self.layers: list[Tensor] = _pools(spec.num_layers, shape, spec.dtype, device)
        """One tensor ``[N + 1, 2, G, P, D]`` or ``[N + 1, P, C]`` a layer."""

    @property
    def dummy_page(self) -> int:
        """Index of the page outside the pool."""
        return self.num_pages


def _pools(num_layers: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Zeros for each layer; on a CPU the kernel hands them out page by page as they are first touched.

    Writing zeros over a pool of 4 GiB takes seconds, and memory that most servers never use.
    """
    if device.type != "cpu":
        return [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]
    size = math.prod(shape) * dtype.itemsize
    stride = _stride(size, num_layers)
    memory = mmap.mmap(-1, stride * num_layers, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # some kernels have no huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)  # attention reads all over the pool: fewer translations to look up
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    return [whole[layer * stride :][:size].view(dtype).view(shape) for layer in range(num_layers)]


def _stride(size: int, num_layers: int) -> int:
    """Bytes from one layer's pool to the next: each begins elsewhere in a huge page.

    Pools that began alike would reach their next huge pages in the same step, which for 30 layers of 2 MiB takes
    130 ms. A huge page has a power of two of places, at least one a layer while places are whole pages; an odd number
    of them from pool to pool comes to each before the first again. Between the pools less than two huge pages lie in
    all, four with a thousand layers.
    """
    places = min(1 << (num_layers - 1).bit_length(), _HUGE_PAGE // mmap.PAGESIZE)
    place = _HUGE_PAGE // places
    return (-(-size // place) | 1) * place
