"""A second stream of the device, for work that may run beside the current stream's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


class SideStream:
    """Runs one piece of work beside another; inside a capture both become branches of the graph."""

    def __init__(self, device: torch.device) -> None:
        """On a CPU there is none, and the pieces run one after the other."""
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def beside(self, work: Callable[[], None]) -> Iterator[None]:
        """Launch ``work``, then what is inside beside it; what the current stream gets afterwards waits for both.

        Both see all that was launched before. What they read must stay until then, and neither may write it.
        """
        if self._stream is None:
            work()
            yield
            return
        main = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(main)
        with torch.cuda.stream(self._stream):
            work()
        try:
            yield
        finally:
            main.wait_stream(self._stream)
