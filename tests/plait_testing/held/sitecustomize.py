"""Python reads this at its start if its folder is on the path: a worker waits in a step while a file says so, and dies
of a step that computes `POISON`.

``PLAIT_TEST_HELD_STEPS`` names the folder of the files. Tokens of the check models are bytes.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

POISON = b"".join(byte.to_bytes(4, "little") for byte in b"~poison~")
"""As token ids on the wire."""
LOOK_SECONDS = 0.01


def held(launch: Callable[[Any, Any], Any], folder: Path) -> Callable[[Any, Any], Any]:
    """``Rank.launch`` or ``Rank.launch_forward``, when the test lets it."""
    hold = folder / "hold"

    def launch_later(rank: Any, plan: Any) -> Any:
        if POISON in bytes(plan.token_ids):
            os.kill(os.getpid(), signal.SIGKILL)
        while (num_decode := _read(hold)) is not None and plan.num_decode >= num_decode:
            (folder / f"held-{os.getpid()}").touch()
            time.sleep(LOOK_SECONDS)
        return launch(rank, plan)

    return launch_later


def _read(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except FileNotFoundError:
        return None


if "plait_worker" in sys.orig_argv:
    from plait_worker.rank import Rank

    folder = Path(os.environ["PLAIT_TEST_HELD_STEPS"])
    Rank.launch = held(Rank.launch, folder)  # type: ignore[method-assign, assignment]
    Rank.launch_forward = held(Rank.launch_forward, folder)  # type: ignore[method-assign, assignment]
