"""The wall clock of the engine and its ranks is set forwards or back while they serve."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from bench.faults.fault_rows import Result, Run
from bench.faults.held_server import RESTART, serving
from bench.faults.observe import leaked_pages, num_losses
from bench.faults.streams import answers, ask, losses, tokens
from plait_testing.running_server import Server
from plait_testing.shifted_clock import ShiftedClock

HOUR = 3600
JUMPS = (HOUR, -HOUR, 10 * 365 * 24 * HOUR, -24 * HOUR)
"""In seconds, each from where the last one left the clock."""
DEADLINES = ("--request-timeout-seconds", "600", "--idle-timeout-seconds", "600", "--max-queue-seconds", "600")
"""Each far shorter than a jump."""
LONG = {"max_tokens": 300}


@contextmanager
def clock_jumps(folder: Path) -> Iterator[Run]:
    """No deadline, heartbeat or step may take it for time that has passed."""
    clock, shifts = ShiftedClock(folder), itertools.cycle(itertools.accumulate(JUMPS))
    with clock.of_servers(), serving(folder, *RESTART, *DEADLINES) as running:
        right = answers(running.url, **LONG)
        yield lambda: jump(running, clock, next(shifts), right)


def jump(running: Server, clock: ShiftedClock, shift: int, right: list[list[str]]) -> Result:
    streams = ask(running.url, **LONG)
    for one in streams:
        one.has_begun.wait(60)
    clock.move(shift)
    given = tokens(streams)
    return {
        "longest_pause_seconds": max(max(one.gaps(), default=0.0) for one in streams),
        "failures": num_losses(running.url) + (not follows(running, shift)),
        **losses(given, right),
        "leaked_pages": leaked_pages(running.url),
    }


def follows(running: Server, shift: int) -> bool:
    """Whether the server is well and its answers have the moved time: else nothing was moved."""
    body, asked = {"prompt": "count 1 9", "max_tokens": 1}, int(time.time())
    answer = httpx.post(f"{running.url}/v1/completions", json=body, timeout=60)
    is_well = httpx.get(f"{running.url}/health", timeout=60).status_code == answer.status_code == 200
    return is_well and asked <= answer.json()["created"] - shift <= time.time()
