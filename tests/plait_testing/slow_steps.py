"""Servers whose answers do not end before a test wants it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

SLOWED = Path(__file__).parent / "slowed"


class SlowSteps:
    """Slows the steps of all servers that were started within `of_servers`; full speed at first."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "slow-steps"

    @contextmanager
    def of_servers(self) -> Iterator[None]:
        """Servers that are started within have workers that look at the file."""
        path = os.pathsep.join(filter(None, (str(SLOWED), os.environ.get("PYTHONPATH"))))
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", path)
            patch.setenv("PLAIT_TEST_SLOW_STEPS", str(self._file))
            yield

    def begin(self) -> None:
        self._file.touch()

    def end(self) -> None:
        self._file.unlink(missing_ok=True)

    @contextmanager
    def within(self) -> Iterator[None]:
        """Slow steps until the end of the block."""
        self.begin()
        try:
            yield
        finally:
            self.end()
