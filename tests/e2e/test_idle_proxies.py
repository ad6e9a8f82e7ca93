"""A proxy that cuts idle lines, between a client and a server whose only slot is taken for a while."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest
from plait_testing.idle_proxy import IdleProxy, idle_proxy
from plait_testing.metrics import read_metrics
from plait_testing.running_server import Server, start_server
from plait_testing.slow_steps import SlowSteps

IDLE_SECONDS = 4.0
COMMENT = ": waiting"
CHAT = {"messages": [{"role": "user", "content": "copy kilo"}], "temperature": 0, "stream": True, "max_tokens": 8}
LONG = {"prompt": "a", "max_tokens": 4000, "ignore_eos": True, "stream": True}
WAITING = "plait_requests_waiting"
LEFT = 'plait_http_answers_total{path="/v1/chat/completions",status="none"}'
Start = Callable[[float], Server]


@pytest.fixture
def start(check_models: Path, recall_steps: SlowSteps, tmp_path: Path) -> Iterator[Start]:
    """Starts a server of one slot that comments so often."""
    servers: list[Server] = []

    def begin(comment_seconds: float) -> Server:
        flags = ("--threads=1", "--max-seqs=1", f"--stream-comment-seconds={comment_seconds}")
        with recall_steps.of_servers():
            servers.append(start_server(tmp_path / "log", check_models / "recall-gqa", *flags))
        assert servers[0].url, servers[0].errors
        return servers[0]

    yield begin
    for server in servers:
        server.kill()


@contextmanager
def occupied(server: Server, steps: SlowSteps) -> Iterator[None]:
    """The slot is taken, and steps are slow so that it stays so."""
    with (
        steps.within(),
        httpx.stream("POST", f"{server.url}/v1/completions", json=LONG, timeout=120) as running,
    ):
        lines = running.iter_lines()  # as long as it lives, so does the stream
        assert next(lines)
        yield


@contextmanager
def asked(proxy: IdleProxy) -> Iterator[Iterator[str]]:
    """The lines of a chat's stream."""
    with httpx.stream("POST", f"{proxy.url}/v1/chat/completions", json=CHAT, timeout=120) as answer:
        assert answer.status_code == 200
        yield (line for line in answer.iter_lines() if line)


def text_of(lines: Iterator[str]) -> str:
    chunks = [line.removeprefix("data: ") for line in lines if line != COMMENT]
    assert chunks.pop() == "[DONE]"
    return "".join(json.loads(chunk)["choices"][0]["delta"].get("content") or "" for chunk in chunks)


def test_comments_hold_the_line_of_a_request_that_waits(start: Start, recall_steps: SlowSteps) -> None:
    server = start(0.5)
    with idle_proxy(server.url, IDLE_SECONDS) as proxy, ExitStack() as asking:
        with occupied(server, recall_steps):
            begun = time.monotonic()
            lines = asking.enter_context(asked(proxy))
            while time.monotonic() < begun + 2 * IDLE_SECONDS:
                assert next(lines) == COMMENT
            assert read_metrics(server.url)[WAITING] == 1
        assert (text_of(lines), proxy.num_cut) == ("kilo", 0)


def test_without_comments_it_is_cut_and_has_left(start: Start, recall_steps: SlowSteps) -> None:
    server = start(0)
    with idle_proxy(server.url, IDLE_SECONDS) as proxy, occupied(server, recall_steps):
        with pytest.raises(httpx.TransportError), asked(proxy) as lines:
            next(lines)
        assert proxy.num_cut == 1
        deadline = time.monotonic() + 60
        while not has_left(read_metrics(server.url)):
            assert time.monotonic() < deadline
            time.sleep(0.1)


def has_left(metrics: dict[str, float]) -> bool:
    """Whether the chat no longer waits, and is told as one whose client left."""
    return (metrics[WAITING], metrics.get(LEFT)) == (0, 1)
