"""The heap is given back some time after large bodies, and not after others."""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Callable

import psutil
import pytest
from plait.http.heap_trim import LARGE_BYTES, HeapTrim, _trim_of_libc

SECONDS = 0.05


def num_trims(*bodies: tuple[float, int]) -> int:
    """How often the heap is given back, where each body comes so many seconds after the one before."""
    trims: list[None] = []
    heap = HeapTrim(lambda: trims.append(None), SECONDS)

    async def read() -> None:
        for seconds, num_bytes in bodies:
            await asyncio.sleep(seconds)
            heap.after_body(num_bytes)
        await asyncio.sleep(6 * SECONDS)

    asyncio.run(read())
    return len(trims)


def test_small_bodies_never_trim() -> None:
    assert num_trims(*(100 * [(0.0, LARGE_BYTES - 1)])) == 0


def test_a_large_body_trims_once() -> None:
    assert num_trims((0.0, LARGE_BYTES)) == 1


def test_bodies_before_a_trim_share_it_and_are_followed_by_another() -> None:
    """They may still be in use at the first."""
    assert num_trims(*(100 * [(0.0, LARGE_BYTES)])) == 2


def test_a_body_after_a_trim_begins_another() -> None:
    assert num_trims((0.0, LARGE_BYTES), (3 * SECONDS, LARGE_BYTES)) == 2


def test_freed_memory_below_a_block_in_use_is_given_back() -> None:
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "malloc_trim"):
        pytest.skip("the C library is not glibc")
    num_bytes = freed_below_a_block(libc)
    before = psutil.Process().memory_info().rss
    _trim_of_libc()()
    assert before - psutil.Process().memory_info().rss > num_bytes / 2


def freed_below_a_block(libc: ctypes.CDLL) -> int:
    """Blocks from the heap, written and freed but for the last."""
    malloc: Callable[[int], int] = libc.malloc
    libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = (
        ctypes.c_void_p,
        [ctypes.c_size_t],
        [ctypes.c_void_p],
    )
    blocks = [malloc(100_000) for _ in range(400)]
    for block in blocks:
        ctypes.memset(block, 1, 100_000)
    for block in blocks[:-1]:
        libc.free(block)
    return 100_000 * len(blocks)
