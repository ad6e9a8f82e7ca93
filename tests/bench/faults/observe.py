"""What a server says of itself around a fault: losses noticed, pages held, processes left."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import suppress

import httpx
import psutil
from plait_testing.metrics import read_metrics, sum_over_replicas
from plait_testing.running_server import Server

POLL_SECONDS = 0.005
NOTICE_SECONDS = 60.0
LEFT_SECONDS = 60.0
"""What is held, or runs, for longer after the last answer counts as leaked, or as an orphan."""
HELD_PAGES = ("leased", "parked")


def detection(url: str, since: float, losses_before: float) -> float:
    """Seconds until `/ready` answers 503 or a loss is counted. Raises `TimeoutError`."""
    with httpx.Client(timeout=60) as client:
        while client.get(f"{url}/ready").status_code == 200 and num_losses(url) == losses_before:
            if time.monotonic() > since + NOTICE_SECONDS:
                raise TimeoutError(f"no loss was noticed in {NOTICE_SECONDS:g} s")
            time.sleep(POLL_SECONDS)
    return time.monotonic() - since


def metric(url: str, name: str) -> float:
    """Of all replicas."""
    return sum_over_replicas(read_metrics(url))[name]


def num_losses(url: str) -> float:
    return metric(url, "plait_rank_losses_total")


def wait_until_whole(running: Server) -> None:
    """Until every replica has its ranks."""
    running.wait_until_serving()
    while metric(running.url, "plait_replica_down"):
        time.sleep(POLL_SECONDS)


def held_pages(url: str) -> float:
    """Pages of requests."""
    return sum(metric(url, f'plait_kv_pages{{state="{state}"}}') for state in HELD_PAGES)


def reaches(holds: Callable[[], bool], seconds: float) -> bool:
    """Whether it holds in time."""
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_SECONDS)
    return True


def leaked_pages(url: str) -> float:
    """Pages that nobody asks for any more and that are not given back."""
    reaches(lambda: held_pages(url) == 0, LEFT_SECONDS)
    return held_pages(url)


def num_files(running: Server) -> int:
    """Descriptors that the engine's process has open."""
    num: int = psutil.Process(running.process.pid).num_fds()
    return num


def leaked_files(running: Server, before: int) -> float:
    """More descriptors than before."""
    reaches(lambda: num_files(running) <= before, LEFT_SECONDS)
    return max(0, num_files(running) - before)


def is_there(process: psutil.Process) -> bool:
    """A process that was not reaped yet counts as ended."""
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def orphans(processes: Iterable[psutil.Process]) -> float:
    """Those that are left after `LEFT_SECONDS`."""
    left = list(processes)
    reaches(lambda: not any(map(is_there, left)), LEFT_SECONDS)
    return sum(map(is_there, left))
