"""Memory in huge pages for weights, which every step reads from end to end: fewer TLB misses."""

from __future__ import annotations

import math
import mmap
import threading
from contextlib import suppress

import torch
from torch import Tensor

_HUGE_PAGE = 1 << 21
_HUGE_CHUNK = 32 * _HUGE_PAGE
_LINE = 64


class _Chunks:
    """A bump allocator over large mappings of huge pages; matrices live as long as the process.

    Thread-safe: ranks may be threads of one process.
    """

    def __init__(self) -> None:
        self._left = torch.empty(0, dtype=torch.uint8)
        self._alone = threading.Lock()

    def allocate(self, num_bytes: int) -> Tensor:
        with self._alone:
            if num_bytes > len(self._left):
                self._left = _map(max(num_bytes, _HUGE_CHUNK))
            taken, self._left = self._left[:num_bytes], self._left[math.ceil(num_bytes / _LINE) * _LINE :]
        return taken


_chunks = _Chunks()


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor of zeros for weights, on the CPU; it lives as long as the process."""
    return _chunks.allocate(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)


def _map(num_bytes: int) -> Tensor:
    """A new mapping of at least so many zero bytes, uint8, in huge pages if the OS has them.

    Pages are allocated at first touch. Raises ``OSError`` if there is no memory.
    """
    size = math.ceil(num_bytes / _HUGE_PAGE) * _HUGE_PAGE
    memory = mmap.mmap(-1, size + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # some systems have none
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    begin = -whole.data_ptr() % _HUGE_PAGE
    return whole[begin : begin + size]
