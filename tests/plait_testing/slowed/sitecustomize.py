"""Python reads this at its start if its folder is on the path. While a file is there, each step of a worker takes
`STEP_SECONDS`, after `NUM_SHORT` of them `LATER_STEP_SECONDS`, or until the file is gone.

``PLAIT_TEST_SLOW_STEPS`` names the file. What a test does to a server within an answer then comes within it, however
long the machine leaves the test alone: an answer of a few hundred tokens outlasts the test.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

STEP_SECONDS = 0.1
NUM_SHORT = 30
LATER_STEP_SECONDS = 1.0
"""Far less than the time after which a step is overdue."""
LOOK_SECONDS = 0.01


def slowed(launch: Callable[[Any, Any], Any], file: str) -> Callable[[Any, Any], Any]:
    """``Rank.launch``, late."""
    num_slowed = 0

    def late(rank: Any, plan: Any) -> Any:
        nonlocal num_slowed
        until = time.monotonic() + (STEP_SECONDS if num_slowed < NUM_SHORT else LATER_STEP_SECONDS)
        while is_slow := os.path.exists(file):
            if time.monotonic() >= until:
                break
            time.sleep(LOOK_SECONDS)
        num_slowed = num_slowed + 1 if is_slow else 0
        return launch(rank, plan)

    return late


if "plait_worker" in sys.orig_argv:
    from plait_worker.rank import Rank

    Rank.launch = slowed(Rank.launch, os.environ["PLAIT_TEST_SLOW_STEPS"])  # type: ignore[method-assign, assignment]
