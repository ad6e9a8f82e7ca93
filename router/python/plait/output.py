"""Standard output whose reader is gone."""

from __future__ import annotations

import os
import sys


def drop_output() -> None:
    """Nobody reads any more (`| head`): what is still printed, and what is flushed at the exit, goes nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
