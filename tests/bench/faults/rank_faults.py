"""A rank without memory, one that answers garbage, and a request that takes ranks down."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
from bench.faults.fault_rows import Result, Run
from bench.faults.held_server import HeldServer, held_server
from bench.faults.lost_rank import lose_rank
from bench.faults.observe import NOTICE_SECONDS, leaked_pages, metric, num_losses, orphans, reaches, wait_until_whole
from bench.faults.streams import NUM_STREAMS, losses, tokens
from plait_testing.held.sitecustomize import GARBAGE
from plait_testing.node_network import exhaust_memory


@contextmanager
def out_of_memory(folder: Path) -> Iterator[Run]:
    """The kernel gives a rank no more memory, and its step asks for some."""
    with held_server(folder) as held:

        def starve(rank: psutil.Process) -> None:
            exhaust_memory(rank)
            held.steps.ask_for_memory()

        yield lambda: lose_rank(held.running, held.under_way(), held.right, starve, held.steps.end)


@contextmanager
def garbage(folder: Path) -> Iterator[Run]:
    """A rank sends something else in place of a result: each kind in its turn."""
    kinds = itertools.cycle(GARBAGE)
    with held_server(folder) as held:

        def garble(_: psutil.Process) -> None:
            held.steps.garble(next(kinds))

        yield lambda: lose_rank(held.running, held.under_way(), held.right, garble, held.steps.end)


@contextmanager
def poisoned_request(folder: Path) -> Iterator[Run]:
    """A request of which ranks die: refused after two, by name, and the others go on both times."""
    with held_server(folder) as held, ThreadPoolExecutor(1) as pool:
        yield lambda: poison(held, pool)


def poison(held: HeldServer, pool: ThreadPoolExecutor) -> Result:
    url, ranks, before = held.running.url, held.running.workers(), num_losses(held.running.url)
    streams = held.under_way()
    refused = pool.submit(post_poison, url)
    reaches(lambda: num_requests(url) > NUM_STREAMS, NOTICE_SECONDS)
    struck = time.monotonic()
    held.steps.end()
    given = tokens(streams)
    wait_until_whole(held.running)
    return {
        "refusal_seconds": refusal(refused)[1] - struck,
        "recovery_seconds": max(one.resumed_at() for one in streams) - struck,
        "losses": num_losses(url) - before,
        "failures": refusal(refused)[0] != "took_workers_down",
        **losses(given, held.right),
        "leaked_pages": leaked_pages(url),
        "orphans": orphans(ranks),
    }


def num_requests(url: str) -> float:
    return sum(metric(url, f"plait_requests_{state}") for state in ("running", "waiting"))


def post_poison(url: str) -> tuple[str, float]:
    """The error's code, and when it came."""
    body = {"prompt": "~poison~", "max_tokens": 4}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=240)
    return answer.json().get("error", {}).get("code", ""), time.monotonic()


def refusal(refused: Future[tuple[str, float]]) -> tuple[str, float]:
    return refused.result(timeout=240)
