"""What an attention backend has to do with the prefill rows of captured steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from plait_worker.graph_sizes import Size


class CapturedPrompts(Protocol):
    """Which captured step prefill rows go by, and what is planned on the host before it is replayed.

    Rows are given by the position of their first new token and by how many new tokens they have.
    """

    @property
    def contexts(self) -> Sequence[int]:
        """Cached tokens that captured steps whose prompts are planned have room for; none where nothing is planned."""
        ...

    def choose(self, roomy: Sequence[Size], starts: Sequence[int], lengths: Sequence[int]) -> Size | None:
        """One of the sizes with room; None where the step is better launched kernel by kernel.

        The fewest tokens come first, and of as many the least context.
        """
        ...

    def plan(self, size: Size, starts: Sequence[int], lengths: Sequence[int]) -> None:
        """Before a step of this size is captured or replayed: what its kernels read of the host."""
        ...


class UnplannedPrompts:
    """``CapturedPrompts`` of kernels that read all lengths on the device."""

    contexts: Sequence[int] = ()

    def choose(self, roomy: Sequence[Size], _starts: Sequence[int], _lengths: Sequence[int]) -> Size | None:
        """The smallest."""
        return next(iter(roomy), None)

    def plan(self, _size: Size, _starts: Sequence[int], _lengths: Sequence[int]) -> None:
        """Nothing."""
