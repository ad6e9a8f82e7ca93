"""Buffers of plans that are made on the host, each written again only when the copy out of it is over.

flashinfer's plans write pinned memory that a copy then reads when the device comes there. A plan written over it before
is the earlier step's plan too, for other lengths: its kernel then reads and writes beyond the step's tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import cycle
from typing import Generic, TypeVar

import torch

from plait_worker.transfer import Mark

NUM_PLANS = 3
"""Kept apart: the engine has two steps on the wire at most, so that none of its steps waits here."""

BuffersT = TypeVar("BuffersT")


class _Slot(Generic[BuffersT]):
    """Buffers, and the place behind the last copy out of them."""

    def __init__(self, buffers: BuffersT) -> None:
        self.buffers = buffers
        self.copied: Mark | None = None


class PlanRing(Generic[BuffersT]):
    """Takes its buffers in turn."""

    def __init__(self, make: Callable[[], BuffersT], device: torch.device) -> None:
        """``device`` is the one that the plans are for."""
        self._device = device
        self._slots = cycle([_Slot(make()) for _ in range(NUM_PLANS)])

    @contextmanager
    def take(self) -> Iterator[BuffersT]:
        """Buffers for the plans of one step, all of which are copied out of them inside; waits for earlier copies."""
        slot = next(self._slots)
        if slot.copied is not None and not slot.copied.is_reached():
            slot.copied.wait()
        yield slot.buffers
        slot.copied = Mark(self._device)
