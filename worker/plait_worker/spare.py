"""A spare: a process that has imported what a rank needs, and waits for the arguments of the rank that it becomes."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from plait_worker.machine import die_with_parent

RANK_NAME = "plait-rank"
"""What ``ps -o comm`` says of a spare that has become a rank."""


def wait_for_arguments(parent: int) -> list[str]:
    """A rank's arguments, a line of JSON on standard input; none if the server ends without a need for them."""
    try:
        die_with_parent(parent)
    except ProcessLookupError:
        return []
    line = sys.stdin.buffer.readline()
    if not line:
        return []
    Path("/proc/self/comm").write_text(RANK_NAME)
    return msgspec.json.decode(line, type=list[str])
