"""Python reads this at its start if its folder is on the path: a worker's steps run over poisoned caches.

``PLAIT_TEST_POISONED`` names a folder, in which each rank writes how many steps were checked.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any


def poisoned(hidden: Callable[[Any, Any], Any], folder: Path) -> Callable[[Any, Any], Any]:
    """``Rank._hidden``, which raises ``AssertionError`` if it writes where it may not."""
    numbers = count(1)

    def checked(rank: Any, rows: Any) -> Any:
        step = PoisonedStep(rank.cache, rows)
        hidden_TD = hidden(rank, rows)
        step.check()
        (folder / f"steps-{os.getpid()}").write_text(str(next(numbers)))
        return hidden_TD

    return checked


if "plait_worker" in sys.orig_argv:
    from plait_testing.poison import PoisonedStep
    from plait_worker.rank import Rank

    Rank._hidden = poisoned(Rank._hidden, Path(os.environ["PLAIT_TEST_POISONED"]))  # type: ignore[method-assign, assignment]
