"""Memory for weights is nobody else's."""

from __future__ import annotations

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from types import FrameType
from typing import Any

import torch
from plait_kernels.cpu import memory

NUM_THREADS = 4
EACH = 5


def give_way(frame: FrameType, _event: str, _what: object) -> Any:
    """Lets the other threads run between any two instructions of the module that is tested."""
    if frame.f_code.co_filename != memory.__file__:
        return None
    frame.f_trace_opcodes = True
    time.sleep(1e-4)
    return give_way


def test_threads_that_take_memory_at_once_never_get_the_same() -> None:
    together = Barrier(NUM_THREADS)

    def take(_thread: int) -> list[torch.Tensor]:
        together.wait()
        sys.settrace(give_way)
        return [memory.empty((64,), torch.uint8) for _ in range(EACH)]

    with ThreadPoolExecutor(NUM_THREADS) as pool:
        taken = [tensor for tensors in pool.map(take, range(NUM_THREADS)) for tensor in tensors]
    assert len({tensor.data_ptr() for tensor in taken}) == NUM_THREADS * EACH
