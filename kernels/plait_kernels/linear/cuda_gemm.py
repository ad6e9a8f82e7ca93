"""What the GEMMs in CUDA C++ for Hopper GPUs share on the host: which GPUs take them, compiling and launching."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple, TypeVar

import torch

from plait_kernels.nvrtc import CudaError, Kernel, compile_kernels, unusable_reason

_log = logging.getLogger(__name__)

WARP, WARPGROUP, WARPGROUP_OUTPUTS = 32, 128, 64
_CAPABILITY = 9, 0
"""Of the GPUs that have wgmma."""
T = TypeVar("T")
_failed: dict[torch.device, str] = {}
"""Why a kernel could not be compiled for a device, or not be loaded there."""


class Launch(NamedTuple):
    """How a kernel is launched."""

    blocks: int
    threads: int
    shared_bytes: int
    cluster: int = 1


@dataclass(frozen=True, slots=True)
class CompiledTile:
    """A tile's sizes, for which the kernel of a source beside this file is compiled."""

    kernel: ClassVar[str]

    def defines(self) -> dict[str, int]:
        """What it is compiled for; how many blocks share the inputs (``splits``) is said at its launch."""
        return {name.upper(): value for name, value in asdict(self).items() if name != "splits"}


def unsupported_reason(device: torch.device) -> str | None:
    """Why the GPU or the installation has none of these kernels; None if they can be used."""
    if device in _failed:
        return _failed[device]
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != _CAPABILITY:
        return "it is not on a Hopper GPU"
    return unusable_reason(device)


@functools.cache
def kernel(name: str, defines: tuple[str, ...], device: torch.device) -> Kernel:
    """The kernel of a source beside this file, compiled once."""
    return compile_kernels(Path(__file__).with_name(f"{name}.cu"), (name,), defines, device)[name]


def compile_all(compile_one: Callable[[T], Kernel], wanted: Iterable[T], device: torch.device) -> None:
    """Several at a time; NVRTC leaves other threads alone meanwhile.

    If one fails the log says why, and the device has none of these kernels from then on: Triton's multiply.
    """
    try:
        with ThreadPoolExecutor() as pool:
            list(pool.map(compile_one, wanted))
    except CudaError as error:
        _failed[device] = str(error).partition("\n")[0]
        _log.warning("GEMMs in CUDA C++ are not used, Triton's are: %s", _failed[device])


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    """Of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count
