"""Python reads this at its start if its folder is on the path. While a file is there, each step of a worker takes
`STEP_SECONDS`, or until the file is gone.

``PLAIT_TEST_SLOW_STEPS`` names the file. What a test does to a server within an answer then comes within it, however
long the machine leaves the test alone: an answer of thousands of tokens outlasts the test.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

STEP_SECONDS = 0.1
LOOK_SECONDS = 0.01


def slowed(launch: Callable[[Any, Any], Any], file: str) -> Callable[[Any, Any], Any]:
    """``Rank.launch``, late."""

    def late(rank: Any, plan: Any) -> Any:
        until = time.monotonic() + STEP_SECONDS
        while os.path.exists(file) and time.monotonic() < until:
            time.sleep(LOOK_SECONDS)
        return launch(rank, plan)

    return late


if "plait_worker" in sys.orig_argv:
    from plait_worker.rank import Rank

    Rank.launch = slowed(Rank.launch, os.environ["PLAIT_TEST_SLOW_STEPS"])  # type: ignore[method-assign, assignment]
