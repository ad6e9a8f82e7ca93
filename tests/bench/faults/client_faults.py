"""Clients that leave, read a byte a second, or hold all connections."""

from __future__ import annotations

import json
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from bench.faults.fault_rows import Result, Run
from bench.faults.held_server import serving
from bench.faults.observe import held_pages, leaked_files, leaked_pages, num_files, reaches
from bench.faults.streams import answers, ask, losses, tokens
from plait.bench.percentiles import percentile
from plait_testing.running_server import Server

TIMEOUT = 120.0
REQUEST: dict[str, Any] = {"prompt": "count 7 9", "max_tokens": 600, "ignore_eos": True, "stream": True}
LONG = {"max_tokens": 300}
AT_A_TIME = 8
NUM_CONNECTIONS = 40
NUM_TURNS = 2
"""Twice as many beside each of both clients."""
SPARE_FILES = 4
MANY_LOGPROBS = {"logprobs": 5, "max_tokens": 600}
"""Some kilobytes a token: the socket of a client that does not read is full at once."""


def port_of(running: Server) -> int:
    return int(running.url.rpartition(":")[2])


@contextmanager
def streaming(running: Server, receive_bytes: int | None = None, **fields: Any) -> Iterator[socket.socket]:
    """A stream that has begun, over a socket of its own, with room for so many bytes or what the system gives."""
    body = json.dumps(REQUEST | fields).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    with socket.socket() as client:
        client.settimeout(TIMEOUT)
        if receive_bytes is not None:  # before the connection, which agrees on a window
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        client.connect(("127.0.0.1", port_of(running)))
        client.sendall(f"{head}\r\n\r\n".encode() + body)
        if client.recv(12) != b"HTTP/1.1 200":
            raise RuntimeError("no stream has begun")
        yield client


@contextmanager
def disconnects(folder: Path, num: int = 1000) -> Iterator[Run]:
    """Clients that leave behind the first bytes of their answer, beside streams that stay."""
    with serving(folder) as running:
        right = answers(running.url, **LONG)
        yield lambda: leave(running, right, num)


def leave(running: Server, right: list[list[str]], num: int) -> Result:
    def leave_one(_: int) -> None:
        with streaming(running) as client:
            client.recv(1)

    reaches(lambda: held_pages(running.url) == 0, TIMEOUT)
    files = num_files(running)
    streams = ask(running.url, **LONG)
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        list(pool.map(leave_one, range(num)))
    given, left = tokens(streams), time.monotonic()
    reaches(lambda: held_pages(running.url) == 0, TIMEOUT)
    return {
        "disconnects": num,
        "pages_back_seconds": time.monotonic() - left,
        **losses(given, right),
        "leaked_pages": leaked_pages(running.url),
        "leaked_files": leaked_files(running, files),
    }


@contextmanager
def slow_client(folder: Path) -> Iterator[Run]:
    """The others' gaps beside a client that reads a byte a second, and beside one that reads all."""
    with serving(folder) as running:
        right = answers(running.url, **LONG)
        yield lambda: beside_slow_one(running, right)


def beside_slow_one(running: Server, right: list[list[str]]) -> Result:
    """Each way to read in its turn, so that what else the machine does meets both.

    A run's p99 is made by its few slowest steps. How far two halves of the same load differ is told too.
    """
    files = num_files(running)
    quick: list[list[float]] = []
    slow: list[list[float]] = []
    given: list[list[str]] = []
    for _ in range(2 * NUM_TURNS):
        for gaps, read, receive_bytes in ((quick, read_all, None), (slow, read_slowly, 1)):
            found, answered = gaps_beside(running, read, receive_bytes)
            gaps.append(found)
            given += answered
    alone, beside = gap_p99(quick), gap_p99(slow)
    return {
        "gap_p99_alone_seconds": alone,
        "gap_p99_beside_seconds": beside,
        "gap_p99_ratio": beside / alone,
        "gap_p99_alone_again_ratio": gap_p99(quick[1::2]) / gap_p99(quick[::2]),
        **losses(given, right * (4 * NUM_TURNS)),
        "leaked_pages": leaked_pages(running.url),
        "leaked_files": leaked_files(running, files),
    }


def gap_p99(runs: Iterable[Iterable[float]]) -> float:
    """Of all their gaps."""
    return percentile(sorted(gap for run in runs for gap in run), 99)


Read = Callable[[socket.socket, threading.Event], object]


def gaps_beside(running: Server, read: Read, receive_bytes: int | None = None) -> tuple[list[float], list[list[str]]]:
    """The gaps and tokens of streams beside a client that reads so."""
    over = threading.Event()
    with streaming(running, receive_bytes, **MANY_LOGPROBS) as client, ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read, client, over)
        streams = ask(running.url, **LONG)
        given = tokens(streams)
        over.set()
        reading.result()
    return [gap for one in streams for gap in one.gaps()], given


def read_all(client: socket.socket, over: threading.Event) -> None:
    while not over.is_set() and client.recv(65_536):
        pass


def read_slowly(client: socket.socket, over: threading.Event) -> None:
    """A byte a second."""
    while not over.wait(1.0) and client.recv(1):
        pass


@contextmanager
def no_descriptors(folder: Path) -> Iterator[Run]:
    """Connections use up the engine's descriptors: streams go on, and once there are some it serves again."""
    with serving(folder) as running:
        right = answers(running.url, **LONG)
        yield lambda: use_up_descriptors(running, right)


def use_up_descriptors(running: Server, right: list[list[str]]) -> Result:
    files = num_files(running)
    streams = ask(running.url, **LONG)
    reaches(lambda: all(one.has_begun.is_set() for one in streams), TIMEOUT)
    with short_of_descriptors(running) as most, ExitStack() as stack:
        for _ in range(NUM_CONNECTIONS):
            stack.enter_context(socket.create_connection(("127.0.0.1", port_of(running)), timeout=TIMEOUT))
        has_struck = reaches(lambda: num_files(running) >= most, TIMEOUT)
        given = tokens(streams)
    freed = time.monotonic()
    reaches(partial(is_serving, running), TIMEOUT)
    return {
        "recovery_seconds": time.monotonic() - freed,
        "failures": not has_struck,
        **losses(given, right),
        "leaked_pages": leaked_pages(running.url),
        "leaked_files": leaked_files(running, files),
    }


@contextmanager
def short_of_descriptors(running: Server) -> Iterator[int]:
    """The engine may have a few more alone, so many in all."""
    limits = resource.prlimit(running.process.pid, resource.RLIMIT_NOFILE)
    most = num_files(running) + SPARE_FILES
    resource.prlimit(running.process.pid, resource.RLIMIT_NOFILE, (most, limits[1]))
    try:
        yield most
    finally:
        resource.prlimit(running.process.pid, resource.RLIMIT_NOFILE, limits)


def is_serving(running: Server) -> bool:
    """Whether a new connection gets an answer."""
    body = {"prompt": "count 1 9", "max_tokens": 1}
    try:
        return httpx.post(f"{running.url}/v1/completions", json=body, timeout=TIMEOUT).status_code == 200
    except httpx.HTTPError:
        return False
