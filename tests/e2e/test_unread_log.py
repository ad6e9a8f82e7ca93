"""A server whose log is not read any more: the reader is gone, or its pipe is full."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from plait_testing.running_server import Server, start_server

ASKED = {"model": "recall-gqa", "prompt": "count 1 9", "max_tokens": 8, "ignore_eos": True}
# Heartbeats come twice a second, and are late after one and a half.
SECONDS_WITHOUT_A_HEARTBEAT = 2.5


@dataclass
class Piped:
    """A server that logs to a pipe, and the pipe's other end."""

    server: Server
    reader: int

    def hang_up(self) -> None:
        os.close(self.reader)

    def fill_up(self) -> None:
        writer = os.open(self.server.log, os.O_WRONLY | os.O_NONBLOCK)
        for size in (4096, 1):
            try:
                while True:
                    os.write(writer, b"x" * size)
            except BlockingIOError:
                pass
        os.close(writer)

    def make_it_log(self) -> None:
        """A heartbeat is late, and comes again."""
        (worker,) = self.server.workers()
        worker.suspend()
        time.sleep(SECONDS_WITHOUT_A_HEARTBEAT)
        worker.resume()
        time.sleep(SECONDS_WITHOUT_A_HEARTBEAT / 2)

    def answer(self) -> httpx.Response:
        return httpx.post(self.server.url + "/v1/completions", json=ASKED, timeout=60)


@pytest.fixture
def piped(check_models: Path, tmp_path: Path) -> Iterator[Piped]:
    log = tmp_path / "log"
    os.mkfifo(log)
    reader = os.open(log, os.O_RDONLY | os.O_NONBLOCK)
    server = start_server(log, check_models / "recall-gqa", "--threads", "2")
    yield Piped(server, reader)
    server.kill()


def test_a_server_whose_log_has_no_reader_goes_on_and_drains(piped: Piped) -> None:
    piped.hang_up()
    piped.make_it_log()
    assert piped.answer().status_code == 200
    assert piped.server.stop(signal.SIGINT) == 0


def test_a_server_whose_log_is_full_goes_on_and_drains(piped: Piped) -> None:
    piped.fill_up()
    piped.make_it_log()
    assert piped.answer().status_code == 200
    assert piped.server.stop(signal.SIGINT) == 0
    os.close(piped.reader)


def test_a_server_whose_log_has_no_reader_still_ends_with_the_code_of_what_was_wrong(piped: Piped) -> None:
    piped.hang_up()
    (worker,) = piped.server.workers()
    worker.kill()
    assert piped.server.wait() == 5
