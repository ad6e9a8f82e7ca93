"""Prefetch of tensors from mapped files, on a few threads ahead of the one that copies them.

Mapping the pages takes half the time of copying a file that is in the page cache. With two threads a copy of 0.8 GiB
takes 0.14 s instead of 0.17 s.
"""

from __future__ import annotations

import ctypes
import mmap
import re
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from torch import Tensor

from plait_worker.machine import free_memory_bytes
from plait_worker.weights.safetensors_folder import SafetensorsFolder

_THREADS = 2
"""More take each other's way."""
_PIECE_BYTES = 16 << 20
_MADV_POPULATE_READ = 22
"""Of Linux 5.14 and later: map the pages of an address range, and read what is not in memory."""


@contextmanager
def prefetch(folder: SafetensorsFolder, names: Collection[str], rank: int = 0, world: int = 1) -> Iterator[None]:
    """Inside, the tensors are populated layer by layer; none if the files exceed half of the free memory.

    Ranks of one machine share its page cache: each reads every ``world``-th piece.
    """
    with ThreadPoolExecutor(_THREADS) as threads:
        if folder.num_bytes() <= free_memory_bytes() // 2:
            for name in sorted(names, key=_in_order):
                threads.submit(_populate_tensor, folder, name, rank, world)
        try:
            yield
        finally:
            threads.shutdown(cancel_futures=True)


def populate(tensor: Tensor, rank: int = 0, world: int = 1) -> bool:
    """Map and read a tensor's pages, or a rank's part of them; False if the kernel does not support it."""
    first = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    end = tensor.data_ptr() + tensor.nbytes
    madvise = ctypes.CDLL(None).madvise
    pieces = range(first + rank * _PIECE_BYTES, end, world * _PIECE_BYTES)
    asked = [
        madvise(ctypes.c_void_p(at), ctypes.c_size_t(min(_PIECE_BYTES, end - at)), _MADV_POPULATE_READ) for at in pieces
    ]
    return not any(asked)


def _populate_tensor(folder: SafetensorsFolder, name: str, rank: int, world: int) -> None:
    populate(folder.mapped(name), rank, world)


def _in_order(name: str) -> list[tuple[int, str]]:
    """Sort key that puts layer 10 after layer 9."""
    return [(int(part), "") if part.isdecimal() else (0, part) for part in re.split(r"(\d+)", name)]
