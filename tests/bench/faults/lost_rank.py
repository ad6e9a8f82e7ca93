"""One loss of a rank under streams."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import psutil
from bench.faults.fault_rows import Result
from bench.faults.observe import detection, leaked_pages, num_losses, orphans, wait_until_whole
from bench.faults.streams import Stream, losses, tokens
from plait_testing.running_server import Server

Strike = Callable[[psutil.Process], object]


def lose_rank(
    running: Server,
    streams: Sequence[Stream],
    right: Sequence[Sequence[str]],
    strike: Strike,
    go_on: Callable[[], object],
    num_lost: int = 1,
) -> Result:
    """Strike the last rank, of whose replica all `num_lost` are lost; `go_on` lets steps end."""
    ranks, before = running.workers(), num_losses(running.url)
    struck = time.monotonic()
    strike(ranks[-1])
    with ThreadPoolExecutor(1) as pool:
        noticed = pool.submit(detection, running.url, struck, before)
        go_on()
        given = tokens(streams)
        detected = noticed.result()
    wait_until_whole(running)
    return {
        "detection_seconds": detected,
        "recovery_seconds": max(one.resumed_at() for one in streams) - struck,
        **losses(given, right),
        "leaked_pages": leaked_pages(running.url),
        "orphans": orphans(ranks[-num_lost:]),
    }
