"""Weights share no memory; a kernel without memory raises an error in Python."""

from __future__ import annotations

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from types import FrameType
from typing import Any

import pytest
import torch
from plait_kernels.cpu import memory

NUM_THREADS = 4
EACH = 5


def give_way(frame: FrameType, _event: str, _what: object) -> Any:
    """Lets other threads run between any two instructions of the tested module."""
    if frame.f_code.co_filename != memory.__file__:
        return None
    frame.f_trace_opcodes = True
    time.sleep(1e-4)
    return give_way


def test_threads_that_allocate_at_once_never_get_the_same_memory() -> None:
    together = Barrier(NUM_THREADS)

    def take(_thread: int) -> list[torch.Tensor]:
        together.wait()
        sys.settrace(give_way)
        return [memory.empty((64,), torch.uint8) for _ in range(EACH)]

    with ThreadPoolExecutor(NUM_THREADS) as pool:
        taken = [tensor for tensors in pool.map(take, range(NUM_THREADS)) for tensor in tensors]
    assert len({tensor.data_ptr() for tensor in taken}) == NUM_THREADS * EACH


SHORT_OF_MEMORY = """
import resource
import torch
from plait_kernels.cpu import library
from plait_kernels.linear import CpuBlockMatrix, BlockWeight
from plait_kernels.sampling import Filters, cpu

VOCAB, SLACK = 1 << 23, 4 << 20

def refused(call):
    resource.setrlimit(resource.RLIMIT_AS, (used() + SLACK, resource.RLIM_INFINITY))
    try:
        call()
    except (MemoryError, RuntimeError) as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

def used():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()

library.set_num_threads(2)
matrix = CpuBlockMatrix([BlockWeight("Q8_0", torch.zeros(1, 34, dtype=torch.uint8))], None, torch.float32, 16)
rows = torch.ones(1 << 18, 32)
logits = torch.zeros(2, VOCAB)
logits[:, 7] = 100
filters = Filters(torch.tensor([0, 5]), torch.tensor([0.9, 1.0]), torch.zeros(2))
sample = lambda: cpu.sample_filtered(logits, torch.ones(2), filters, torch.zeros(2, dtype=torch.float64))
print(refused(lambda: matrix(rows)), refused(sample), sample().tolist(), matrix(rows).sum().item(), sep="|")
print(refused(lambda: library.set_num_threads(8)), sample().tolist(), sep="|")
"""


@pytest.mark.process
def test_a_kernel_short_of_memory_raises_and_works_again_with_enough() -> None:
    """On the caller's thread, and on a worker thread, where an exception would end the process."""
    ran = subprocess.run([sys.executable, "-c", SHORT_OF_MEMORY], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    of_memory, of_threads = ran.stdout.splitlines()
    matmul, sampled, ids, total = of_memory.split("|")
    assert "plait_gemm found no memory" in matmul
    assert "plait_sample_filtered found no memory" in sampled
    assert (ids, total) == ("[7, 7]", "0.0")
    started, ids = of_threads.split("|")
    assert "the system starts no more threads" in started
    assert ids == "[7, 7]"
