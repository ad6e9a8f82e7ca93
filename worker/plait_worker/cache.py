"""The paged KV cache of one rank: a pool of pages for each distinct spec of the layers.

Shapes: N pages and one dummy page, 2 for key and value, G key-value heads of this rank, P tokens in a
page, D elements of a head, C elements of an MLA latent with its shared key, R compressed entries in a page.
"""

from __future__ import annotations

import math
import mmap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import torch
from plait_proto.families import CacheKind
from torch import Tensor

from plait_worker.attention.spec import AttentionSpec, CompressedShape
from plait_worker.errors import ensure
from plait_worker.slot_state import NO_STATE, StateSizes, allocate_state
from plait_worker.step_inputs import Ints

_HUGE_PAGE = 1 << 21
"""A huge page of Linux: 2 MiB on x86-64, and on ARM with pages of 4 KiB."""


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """What one layer keeps of each token on this rank; layers with equal specs share a pool."""

    kind: CacheKind
    attention: AttentionSpec
    """Of the layer: it decides a page's shape and type."""

    def page_bytes(self, page_size: int) -> int:
        """Of one page; ``page_size`` in tokens."""
        num_elements = math.prod(self.attention.page_shape(page_size)) + math.prod(self.index_shape(page_size))
        return num_elements * self.attention.cached_dtype.itemsize

    def index_shape(self, page_size: int) -> tuple[int, ...]:
        """Of the indexer's keys in one page; ``[0, 0]`` without an indexer."""
        spec = self.attention
        return spec.index_page_shape(page_size) if isinstance(spec, CompressedShape) else (0, 0)


def bytes_per_page(specs: Iterable[CacheSpec], page_size: int) -> int:
    """Bytes of one page over all layers; ``page_size`` in tokens."""
    return sum(spec.page_bytes(page_size) for spec in specs)


class EntryPages(NamedTuple):
    """The compressed entries of a DeepSeek-V4 layer; R of them in a page."""

    entries: Tensor
    """``[N + 1, R, D]``."""
    index_keys: Tensor
    """``[N + 1, R, index_dim]``; empty without an indexer."""


class KVCache:
    """The pages of every layer; page ``num_pages`` is the dummy that padded tables point at."""

    def __init__(
        self,
        specs: Sequence[CacheSpec],
        num_pages: int,
        page_size: int,
        device: torch.device,
        state: StateSizes = NO_STATE,
    ) -> None:
        """Allocate the pools, zero-filled: a masked probability of 0 times a NaN left in memory is NaN."""
        self.num_pages = num_pages
        self.num_snapshots = state.num_snapshots
        self.page_size = page_size
        pools = {spec: spec.attention.page_shape(page_size) for spec in specs}
        self.layers = _allocate_pages(specs, pools, num_pages + 1, device)
        """One tensor ``[N + 1, 2, G, P, D]``, ``[N + 1, P, C]`` or ``[N + 1, R, D]`` a layer."""
        index_pools = {spec: spec.index_shape(page_size) for spec in specs}
        self.index_keys = _allocate_pages(specs, index_pools, num_pages + 1, device)
        """One tensor ``[N + 1, R, index_dim]`` a layer: of DeepSeek-V4's indexers; else empty."""
        states = (allocate_state(spec.attention, state, device) for spec in specs)
        self.states = [each for each in states if each is not None]
        """Of each layer with slot state: all layers of a model, or none."""

    def restore(self, restored_X2: Ints) -> None:
        """Copy snapshots into slots: pairs ``(slot, snapshot)``. Raises ``WorkerError`` if there is no such one."""
        if len(restored_X2) == 0:
            return
        self.check_snapshots(restored_X2[:, 1])
        slots_X, snapshots_X = torch.from_numpy(restored_X2).T
        for state in self.states:
            state.restore(slots_X.to(state.raw.device), snapshots_X.to(state.raw.device))

    def check_snapshots(self, snapshots: Ints) -> None:
        """Raise ``WorkerError`` if the plan names a snapshot that is not there."""
        most = self.num_snapshots
        ensure(len(snapshots) == 0 or int(snapshots.max()) < most, f"the plan names a snapshot, and there are {most}")

    @property
    def entry_pages(self) -> list[EntryPages]:
        """Of each layer."""
        return [EntryPages(*pair) for pair in zip(self.layers, self.index_keys, strict=True)]

    @property
    def dummy_page(self) -> int:
        """Index of the page outside the pool."""
        return self.num_pages


def _allocate_pages(
    specs: Sequence[CacheSpec], shapes: Mapping[CacheSpec, tuple[int, ...]], num_pages: int, device: torch.device
) -> list[Tensor]:
    """A pool for each spec, of pages of its shape; a part of it for each layer."""
    pools = {
        spec: iter(_allocate((num_pages, *shapes[spec]), spec.attention.cached_dtype, num, device))
        for spec, num in Counter(specs).items()
    }
    return [next(pools[spec]) for spec in specs]


def _allocate(shape: tuple[int, ...], dtype: torch.dtype, num_layers: int, device: torch.device) -> list[Tensor]:
    """Zeros for each layer; on a CPU the kernel maps them page by page on first touch.

    Writing zeros over a pool of 4 GiB takes seconds, and memory that most servers never use.
    """
    if device.type != "cpu" or not math.prod(shape):
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
