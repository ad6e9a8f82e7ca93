"""Too few pages for the requests, and a full disk under logs, caches and records."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
from bench.faults.fault_rows import Result, Run
from bench.faults.held_server import HeldServer, held_server, serving
from bench.faults.lost_rank import lose_rank
from bench.faults.observe import leaked_pages, metric
from bench.faults.streams import Stream, ask, losses, tokens
from plait_testing.running_server import Server

NUM_REQUESTS = 8
FEW_PAGES = ("--num-pages", "24", "--page-size", "16", "--max-seqs", "8", "--watermark", "0")
"""Each request needs eleven. None is kept free, so that all are admitted and some must give way."""
LONG = {"max_tokens": 160}
DISK_BYTES = 256 * 1024
CACHES = ("HOME", "TMPDIR", "XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


@contextmanager
def kv_exhaustion(folder: Path) -> Iterator[Run]:
    """Requests that give their pages back and come again have the tokens of lone ones."""
    with serving(folder, *FEW_PAGES) as running:
        right = [lone(running, number) for number in range(NUM_REQUESTS)]
        yield lambda: exhaust_pages(running, right)


def lone(running: Server, number: int) -> list[str]:
    return tokens([Stream(running.url, number, **LONG)])[0]


def exhaust_pages(running: Server, right: list[list[str]]) -> Result:
    before = metric(running.url, "plait_preemptions_total")
    streams = ask(running.url, NUM_REQUESTS, **LONG)
    given = tokens(streams)
    return {
        "preemptions": metric(running.url, "plait_preemptions_total") - before,
        "longest_pause_seconds": max(max(one.gaps()) for one in streams),
        **losses(given, right),
        "leaked_pages": leaked_pages(running.url),
    }


@contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """A disk of `DISK_BYTES`; root is needed."""
    disk = folder / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "none", disk], check=True)
    try:
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)


@contextmanager
def environment(**variables: str) -> Iterator[None]:
    """Of processes that are started within."""
    before = os.environ.copy()
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def full_disk(folder: Path) -> Iterator[Run]:
    """The log, the caches, the count of restarts and the step trace lie on a full disk when a rank is killed."""
    with small_disk(folder) as disk, environment(**dict.fromkeys(CACHES, str(disk))):
        records = ("--restart-file", str(disk / "restarts"), "--step-trace", str(disk / "steps"))
        with held_server(folder, *records, "--log-level", "debug", log=disk / "log") as held:
            fill(disk)
            yield lambda: lose_rank_of(held)


def fill(disk: Path) -> None:
    """To the last byte."""
    with suppress(OSError), (disk / "filler").open("wb", buffering=0) as file:
        while file.write(b"x" * 4096):
            pass


def lose_rank_of(held: HeldServer) -> Result:
    return lose_rank(held.running, held.under_way(), held.right, psutil.Process.kill, held.steps.end)
