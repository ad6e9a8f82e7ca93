"""Memory for weights that every step reads from end to end."""

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
    """A tensor of zeros on the CPU, in huge pages where the kernel has them: fewer translations to look up."""
    return _chunks.take(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)


def _map(num_bytes: int) -> Tensor:
    size = math.ceil(num_bytes / _HUGE_PAGE) * _HUGE_PAGE
    memory = mmap.mmap(-1, size + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # some kernels have none
        memory.madvise(mmap.MADV_HUGEPAGE)
    mapped = torch.frombuffer(memory, dtype=torch.uint8)
    aligned = -mapped.data_ptr() % _HUGE_PAGE
    return mapped[aligned : aligned + size]
