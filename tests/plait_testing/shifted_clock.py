"""Servers whose wall clock a test moves. The monotonic clock goes on, as it does on a machine whose time is set."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_suffix(".c")


def reason_without_compiler() -> str:
    """Why no clock can be moved here; empty if one can."""
    return "" if shutil.which("cc") else "no C compiler"


class ShiftedClock:
    """Of all servers that were started within `of_servers`; right at first."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "clock-shift"
        self._library = folder / "shifted-clock.so"
        self.move(0)
        subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", self._library, SOURCE, "-ldl"], check=True)

    @contextmanager
    def of_servers(self) -> Iterator[None]:
        """Servers that are started within ask the moved clock, and so do their workers."""
        loaded = " ".join(filter(None, (str(self._library), os.environ.get("LD_PRELOAD"))))
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("LD_PRELOAD", loaded)
            patch.setenv("PLAIT_TEST_CLOCK", str(self._file))
            yield

    def move(self, seconds: int) -> None:
        """So far from the right time."""
        with self._file.open("r+b" if self._file.exists() else "wb", buffering=0) as file:
            file.write(seconds.to_bytes(8, "little", signed=True))
