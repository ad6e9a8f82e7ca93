"""What standard input asks of a launcher that was started through a connection."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import time
from collections.abc import Callable

import pytest
from plait.nodes.signals import StopRequests


def requests_after(stdin: int, change: Callable[[], object]) -> int:
    """How often somebody has asked for the end, once what `change` does to the input was noticed."""

    async def attach() -> int:
        requests = StopRequests()
        requests.attach_stdin(asyncio.get_running_loop(), stdin)
        change()
        async with asyncio.timeout(20):
            while not requests.num_signals:
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        return requests.num_signals

    return asyncio.run(attach())


def test_a_line_asks_once_and_the_end_of_a_pipe_asks_twice() -> None:
    reader, writer = os.pipe()
    assert requests_after(reader, lambda: os.write(writer, b"drain\n")) == 1
    assert requests_after(reader, lambda: os.close(writer)) == 2
    os.close(reader)


def test_silence_behind_signs_of_life_asks_twice_as_an_end_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plait.nodes.signals.SILENCE_SECONDS", 0.5)
    reader, writer = os.pipe()
    began = time.monotonic()
    assert requests_after(reader, lambda: os.write(writer, b"..")) == 2
    assert time.monotonic() - began >= 0.5
    os.close(writer)
    os.close(reader)


def test_a_connection_that_is_reset_is_the_end() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as far:
        near, _ = server.accept()
        far.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        with near:
            assert requests_after(near.fileno(), far.close) == 2
