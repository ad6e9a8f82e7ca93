"""What a server must survive of clients and machine: nothing leaks, and the others' answers are right."""

from __future__ import annotations

import json
import re
import resource
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from models import recall_tasks
from plait_testing.running_server import Server, start_server

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PAGES, PAGE = 40, 16
FULL_DISK = Path("/dev/full")
TIMEOUT = 120.0
ENDLESS: dict[str, Any] = {"prompt": [7] * 20, "max_tokens": 600, "ignore_eos": True, "stream": True, "temperature": 0}

MANY_LOGPROBS = 5
"""Of a completion: some kilobytes a token."""


@pytest.fixture(scope="module")
def short_of_pages(check_models: Path) -> Iterator[Server]:
    """A server whose pages are too few for its requests, and whose log lies on a full disk."""
    pages = ("--num-pages", str(PAGES), "--page-size", str(PAGE), "--max-model-len", "640", "--max-seqs", "8")
    log = ("--log-level", "debug")
    one = start_server(FULL_DISK, check_models / "recall-gqa", *pages, *log, "--dtype", "float32", "--threads", "1")
    assert one.url
    yield one
    assert one.stop() == 0


def metrics(server: Server) -> dict[str, float]:
    text = httpx.get(server.url + "/metrics", timeout=TIMEOUT).text
    samples = re.findall(r"^(plait_[^ ]+) (\S+)$", text, re.MULTILINE)
    return {name: float(value) for name, value in samples}


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_at_rest(server: Server) -> bool:
    """No request is left, and every page is free or cached."""
    found = metrics(server)
    held = [found[f'plait_kv_pages{{state="{state}"}}'] for state in ("leased", "parked")]
    kept = [found[f'plait_kv_pages{{state="{state}"}}'] for state in ("free", "cached")]
    return (
        held == [0, 0]
        and sum(kept) == PAGES
        and found["plait_requests_running"] == found["plait_requests_waiting"] == 0
    )


def num_descriptors(server: Server) -> int:
    num: int = psutil.Process(server.process.pid).num_fds()
    return num


def unsent_bytes(port: int) -> int:
    """What the server's end of a connection keeps because the client at ``port`` does not read."""
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, _, remote, _, queues, *_ = line.split()
        if int(remote.rpartition(":")[2], 16) == port:
            return int(queues.partition(":")[0], 16)
    return 0


@contextmanager
def streaming(server: Server, receive_bytes: int | None = None, **fields: Any) -> Iterator[socket.socket]:
    """A stream that has begun, over a socket of its own, with room for so many bytes or what the system gives."""
    body = json.dumps(ENDLESS | fields).encode()
    lines = (
        f"POST {COMPLETIONS} HTTP/1.1",
        "host: x",
        "content-type: application/json",
        f"content-length: {len(body)}",
    )
    port = int(server.url.rpartition(":")[2])
    with socket.socket() as client:
        client.settimeout(TIMEOUT)
        if receive_bytes is not None:  # before the connection, which agrees on a window
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        client.connect(("127.0.0.1", port))
        client.sendall("\r\n".join((*lines, "", "")).encode() + body)
        assert client.recv(12) == b"HTTP/1.1 200"
        yield client


def answers(server: Server, num: int) -> None:
    """So many questions at a time have right answers."""
    asked = recall_tasks.problems(seed=27, num=num, budget=300)

    def answer(problem: Any) -> str:
        body = {"messages": problem["messages"], "temperature": 0}
        said: str = httpx.post(server.url + CHAT, json=body, timeout=TIMEOUT).json()["choices"][0]["message"]["content"]
        return said

    with ThreadPoolExecutor(num) as pool:
        assert list(pool.map(answer, asked)) == [problem["answer"] for problem in asked]


@pytest.mark.parametrize("num", [40, pytest.param(1000, marks=pytest.mark.slow)], ids=["reduced", "a thousand"])
def test_clients_that_leave_in_mid_stream_leak_nothing(short_of_pages: Server, num: int) -> None:
    answers(short_of_pages, 2)
    until(lambda: is_at_rest(short_of_pages))
    before = num_descriptors(short_of_pages)

    def leave(_: int) -> None:
        with streaming(short_of_pages) as client:
            client.recv(1)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(leave, range(num)))
    until(lambda: is_at_rest(short_of_pages))
    until(lambda: num_descriptors(short_of_pages) <= before)
    answers(short_of_pages, 2)


def test_requests_beyond_the_pages_all_end_with_the_tokens_of_a_lone_one(short_of_pages: Server) -> None:
    body = ENDLESS | {"stream": False, "return_token_ids": True, "max_tokens": 120}

    def token_ids(number: int) -> list[int]:
        sent = body | {"prompt": [20 + number] * 20}
        answer = httpx.post(short_of_pages.url + COMPLETIONS, json=sent, timeout=TIMEOUT).json()
        ids: list[int] = answer["choices"][0]["token_ids"]
        return ids

    alone = [token_ids(number) for number in range(3)]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(token_ids, [*range(3)] * 2))
    assert together == alone * 2
    assert all(len(ids) == 120 for ids in together)
    until(lambda: is_at_rest(short_of_pages))


def test_a_client_that_reads_a_byte_at_a_time_holds_up_nobody(short_of_pages: Server) -> None:
    with streaming(short_of_pages, logprobs=MANY_LOGPROBS, receive_bytes=1) as slow:
        port = slow.getsockname()[1]
        until(lambda: unsent_bytes(port) > 0)
        for _ in range(4):
            answers(short_of_pages, 2)
            assert len(slow.recv(1)) == 1
            assert unsent_bytes(port) > 0, "the server holds what does not fit the client's socket"
    until(lambda: is_at_rest(short_of_pages))


def test_a_server_without_descriptors_goes_on_with_its_streams_and_recovers(short_of_pages: Server) -> None:
    until(lambda: is_at_rest(short_of_pages))
    pid, port = short_of_pages.process.pid, int(short_of_pages.url.rpartition(":")[2])
    with streaming(short_of_pages) as client, ExitStack() as stack:
        limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (num_descriptors(short_of_pages) + 4, limits[1]))
        stack.callback(resource.prlimit, pid, resource.RLIMIT_NOFILE, limits)
        for _ in range(40):
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT))
        said = bytearray()
        while b"[DONE]" not in said:
            piece = client.recv(65_536)
            assert piece, said[-200:]
            said += piece
    answers(short_of_pages, 2)
    until(lambda: is_at_rest(short_of_pages))
