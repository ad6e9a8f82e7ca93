"""Pinned buffers of host plans; each is rewritten only after the copy from it has finished.

flashinfer's plans write pinned memory, which the device copies later. A plan that overwrites it too early replaces the
earlier step's plan: its kernel then reads and writes beyond that step's tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import cycle
from typing import Generic, TypeVar

import torch

from plait_worker.transfer import DeviceEvent

NUM_PLANS = 3
"""The engine has at most two steps on the wire, so no step waits here."""

BuffersT = TypeVar("BuffersT")


class _Slot(Generic[BuffersT]):
    """Buffers, and the event after the last copy from them."""

    def __init__(self, buffers: BuffersT) -> None:
        self.buffers = buffers
        self.copied: DeviceEvent | None = None


class PlanRing(Generic[BuffersT]):
    """Hands out its buffers round-robin."""

    def __init__(self, make: Callable[[], BuffersT], device: torch.device) -> None:
        """``device`` runs the copies."""
        self._device = device
        self._slots = cycle([_Slot(make()) for _ in range(NUM_PLANS)])

    @contextmanager
    def take(self) -> Iterator[BuffersT]:
        """Buffers for one step's plans. Copies from them must be launched inside; waits for earlier copies."""
        slot = next(self._slots)
        if slot.copied is not None and not slot.copied.is_reached():
            slot.copied.wait()
        yield slot.buffers
        slot.copied = DeviceEvent(self._device)
