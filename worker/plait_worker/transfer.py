"""Asynchronous copies of small arrays between host and device, in stream order."""

from __future__ import annotations

import time
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


def upload(values: NDArray[Any], device: torch.device) -> Tensor:
    """The values on the device.

    On a GPU the copy leaves from pinned memory. torch's pool hands such a block out again only when the
    stream has passed the copy, which makes it a ring without bounds of its own.
    """
    host = torch.from_numpy(values)
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


class Download:
    """A tensor on its way to the host."""

    def __init__(self, values: Tensor) -> None:
        """Start the copy; on a CPU there is none."""
        self._host = values
        if values.is_cuda:
            self._host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._host.copy_(values, non_blocking=True)

    def array(self) -> NDArray[Any]:
        """The values; call it only when a ``DeviceEvent`` made after this object has been reached."""
        values: NDArray[Any] = self._host.numpy()
        return values


class DeviceEvent:
    """A CUDA event with its time; on a CPU the time alone."""

    def __init__(self, device: torch.device) -> None:
        """Record it after all work launched so far."""
        self._event = torch.cuda.Event(enable_timing=True) if device.type == "cuda" else None
        self._made_ns = time.perf_counter_ns()
        if self._event is not None:
            self._event.record()

    def is_reached(self) -> bool:
        """Whether the device has finished all work before it."""
        return self._event is None or self._event.query()

    def wait(self) -> None:
        """Block until it is reached."""
        if self._event is not None:
            self._event.synchronize()

    def us_since(self, earlier: DeviceEvent) -> int:
        """Microseconds between two marks, both reached."""
        if self._event is None or earlier._event is None:
            return (self._made_ns - earlier._made_ns) // 1000
        return int(earlier._event.elapsed_time(self._event) * 1000)
