"""Memory in huge pages, for weights that every step reads from end to end: fewer translations to look up."""

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
    """Large mappings of huge pages, handed out from their beginning; matrices are kept as long as the process.

    Ranks that are threads of one process take from them side by side.
    """

    def __init__(self) -> None:
        self._left = torch.empty(0, dtype=torch.uint8)
        self._alone = threading.Lock()

    def take(self, num_bytes: int) -> Tensor:
        with self._alone:
            if num_bytes > len(self._left):
                self._left = _map(max(num_bytes, _HUGE_CHUNK))
            taken, self._left = self._left[:num_bytes], self._left[math.ceil(num_bytes / _LINE) * _LINE :]
        return taken


_chunks = _Chunks()


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor of zeros for weights, on the CPU; it is kept as long as the process."""
    return _chunks.take(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)


def _map(num_bytes: int) -> Tensor:
    """At least so many zeros, uint8, in a mapping of their own and in huge pages where the kernel has them.

    The kernel hands them out as they are first touched. Raises ``OSError`` where there is no room.
    """
    size = math.ceil(num_bytes / _HUGE_PAGE) * _HUGE_PAGE
    memory = mmap.mmap(-1, size + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # some kernels have none
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    begin = -whole.data_ptr() % _HUGE_PAGE
    return whole[begin : begin + size]
