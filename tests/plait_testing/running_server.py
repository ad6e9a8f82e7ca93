"""A real `plait serve` in a process of its own."""

from __future__ import annotations

import itertools
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

READY = "Plait is ready: "
START_SECONDS = 180.0
STOP_SECONDS = 180.0


StartServer = Callable[..., "Server"]


@dataclass
class Server:
    """A server that was started; `url` is empty if it ended before it was ready."""

    process: subprocess.Popen[str]
    log: Path
    url: str = ""
    lines: list[str] = field(default_factory=list)
    """What it said on standard output."""

    @property
    def errors(self) -> str:
        """What it said on standard error so far."""
        return self.log.read_text()

    @property
    def num_late(self) -> int:
        """How often it said that a heartbeat is late; new requests then go to other replicas."""
        return self.errors.count("a rank's heartbeat is late")

    @property
    def last_line(self) -> str:
        """Its last line on standard error: what was wrong, and what to do."""
        return (self.errors.splitlines() or [""])[-1]

    def workers(self) -> list[psutil.Process]:
        """The processes that it started, the oldest first, without spares that wait to become ranks."""
        children: list[psutil.Process] = psutil.Process(self.process.pid).children(recursive=True)
        children.sort(key=psutil.Process.create_time)  # the system's numbers of processes begin anew at times
        return [child for child in children if not is_spare(child)]

    def spares(self) -> list[psutil.Process]:
        """Processes that wait to become ranks."""
        return [child for child in psutil.Process(self.process.pid).children(recursive=True) if is_spare(child)]

    def read_line(self, start: str) -> str:
        """The line on standard output that begins with `start`, without its indent; said already, or to come."""
        assert self.process.stdout is not None
        lines = (line.strip() for line in itertools.chain(self.lines, self.process.stdout))
        return next(line for line in lines if line.startswith(start))

    def wait_until_draining(self) -> None:
        """Until it takes no requests since it ends, or its group does; a late heartbeat alone is no drain."""
        self._wait_for_ready(lambda answer: "is draining" in answer.text)

    def wait_until_serving(self) -> dict[str, Any]:
        """What it says once it takes requests; it may not while a worker's heartbeat is late."""
        said: dict[str, Any] = self._wait_for_ready(lambda answer: answer.status_code == 200).json()
        return said

    def _wait_for_ready(self, holds: Callable[[httpx.Response], bool]) -> httpx.Response:
        deadline = time.monotonic() + STOP_SECONDS
        while not holds(answer := httpx.get(f"{self.url}/ready", timeout=STOP_SECONDS)):
            if time.monotonic() > deadline:
                raise TimeoutError(answer.text)
            time.sleep(0.02)
        return answer

    def stop(self, number: signal.Signals = signal.SIGINT) -> int:
        """Send a signal and wait for the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.wait()

    def wait(self) -> int:
        """The exit code, once it has ended."""
        rest, _ = self.process.communicate(timeout=STOP_SECONDS)
        self.lines += rest.splitlines()
        return self.process.returncode

    def kill(self) -> None:
        """End it at once, whatever it does."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.communicate()


def is_spare(process: psutil.Process) -> bool:
    """Whether it waits to become a rank; False if it is gone."""
    with suppress(psutil.Error):
        return "--spare" in process.cmdline() and process.name() != "plait-rank"
    return False


def start_server(log: Path, model: Path | None, *flags: str) -> Server:
    """Start `plait serve MODEL --port 0 FLAGS`; returns when it is ready or has ended."""
    words = [str(model)] if model is not None else []
    server = spawn_server(log, "-m", "plait.cli", "serve", *words, "--port", "0", *flags)
    wait_until_ready(server)
    return server


def spawn_server(log: Path, *words: str) -> Server:
    """Start a server by the words that follow `python`; it is not ready yet."""
    with log.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, *words],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            bufsize=1,
            start_new_session=True,
        )
    return Server(process, log)


def wait_until_ready(server: Server) -> None:
    """Returns when it is ready or has ended.

    Raises `TimeoutError`, after killing the server, if neither comes in time.
    """
    pipe = server.process.stdout
    assert pipe is not None
    os.set_blocking(pipe.fileno(), False)
    selector = selectors.DefaultSelector()
    selector.register(pipe, selectors.EVENT_READ)
    deadline, text = time.monotonic() + START_SECONDS, ""
    while time.monotonic() < deadline:
        if not selector.select(timeout=1.0):
            continue
        piece = os.read(pipe.fileno(), 65_536).decode()
        text += piece
        server.lines = text.splitlines()
        server.url = next((line.removeprefix(READY) for line in server.lines if line.startswith(READY)), "")
        if not piece or (server.url and text.endswith("\n")):
            os.set_blocking(pipe.fileno(), True)
            return
    os.set_blocking(pipe.fileno(), True)  # `kill` reads it to its end
    server.kill()
    raise TimeoutError(f"the server was not ready in {START_SECONDS} s; its log: {server.errors}")
