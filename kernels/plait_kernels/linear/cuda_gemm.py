"""What the GEMMs in CUDA C++ for Hopper GPUs share on the host: which GPUs take them, compiling and launching."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch

from plait_kernels.nvrtc import Kernel, compile_kernels, no_compiler_reason

WARP, WARPGROUP, WARPGROUP_OUTPUTS = 32, 128, 64
_CAPABILITY = 9, 0
"""Of the GPUs that have wgmma."""
T = TypeVar("T")


class Launch(NamedTuple):
    """How a kernel is launched."""

    blocks: int
    threads: int
    shared_bytes: int
    cluster: int = 1


def unsupported_reason(device: torch.device) -> str | None:
    """Why the GPU or the installation has none of these kernels; None if they can be used."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != _CAPABILITY:
        return "it is not on a Hopper GPU"
    return no_compiler_reason()


@functools.cache
def kernel(name: str, defines: tuple[str, ...], device: torch.device) -> Kernel:
    """The kernel of a source beside this file, compiled once."""
    return compile_kernels(Path(__file__).with_name(f"{name}.cu"), (name,), defines, device)[name]


def compile_all(compile_one: Callable[[T], Kernel], wanted: Iterable[T]) -> None:
    """Several at a time; NVRTC leaves other threads alone meanwhile."""
    with ThreadPoolExecutor() as pool:
        list(pool.map(compile_one, wanted))


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    """Of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count
