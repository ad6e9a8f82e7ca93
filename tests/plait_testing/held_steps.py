"""Servers whose workers wait in a step until a test lets them go on."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

HELD = Path(__file__).parent / "held"


class HeldSteps:
    """Holds the steps of all servers that were started within `of_servers`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @contextmanager
    def of_servers(self) -> Iterator[None]:
        """Servers that are started within have workers that look at the folder."""
        path = os.pathsep.join(filter(None, (str(HELD), os.environ.get("PYTHONPATH"))))
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", path)
            patch.setenv("PLAIT_TEST_HELD_STEPS", str(self._folder))
            yield

    def begin(self, num_decode: int) -> None:
        """From now on a step with so many decode rows, or more, waits."""
        for old in self._folder.glob("held-*"):
            old.unlink()
        written = self._folder / "hold.new"
        written.write_text(str(num_decode))
        written.replace(self._folder / "hold")

    def wait_until_held(self, num_ranks: int) -> None:
        """Until so many ranks wait in a step."""
        deadline = time.monotonic() + 60
        while len(list(self._folder.glob("held-*"))) < num_ranks:
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def ask_for_memory(self) -> None:
        """Let a rank ask for more memory in its next step, or in the one that waits."""
        (self._folder / "hungry").touch()

    def garble(self, kind: str) -> None:
        """Let a rank send garbage of this kind in place of its next result; `sitecustomize` has them."""
        written = self._folder / "garbage.new"
        written.write_text(kind)
        written.replace(self._folder / "garbage")

    def end(self) -> None:
        (self._folder / "hold").unlink(missing_ok=True)
