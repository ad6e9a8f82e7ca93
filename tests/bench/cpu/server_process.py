"""A server under measurement: started, paused while others are measured, watched, ended."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import httpx
import psutil

Answer = TypeVar("Answer")
START_SECONDS = 300.0
"""vLLM compiles when it starts."""
LOOK_SECONDS = 0.25
STOP_SECONDS = 15.0
RESET_PEAK = "5"
"""Written to /proc/PID/clear_refs: the peak of the resident set begins anew (proc(5))."""


class ServerFailed(Exception):
    """A server did not start, or is gone; the message says why, with its last line."""


@dataclass
class ServerProcess:
    """A server and the processes that it started."""

    name: str
    url: str
    log: Path
    process: subprocess.Popen[bytes]
    tree: list[psutil.Process] = field(default_factory=list)
    """As of the last look: also those whose parent has gone."""

    def look(self) -> list[psutil.Process]:
        """All its processes that are alive."""
        with contextlib.suppress(psutil.NoSuchProcess):
            root = psutil.Process(self.process.pid)
            self.tree = list(dict.fromkeys([*self.tree, root, *root.children(recursive=True)]))
        self.tree = [one for one in self.tree if one.is_running()]
        return self.tree

    def wait_until_ready(self, path: str) -> None:
        """Returns when `path` answers 200; raises `ServerFailed` if it ends first or takes too long."""
        deadline = time.monotonic() + START_SECONDS
        while not self._answers(path):
            self.look()
            if self.process.poll() is not None:
                raise ServerFailed(f"ended with {self.process.returncode} before it was ready: {self.last_line}")
            if time.monotonic() > deadline:
                raise ServerFailed(f"was not ready in {START_SECONDS:g} s: {self.last_line}")
            time.sleep(LOOK_SECONDS)

    def require_alive(self) -> None:
        """Raises `ServerFailed` if it has ended."""
        if self.process.poll() is not None:
            raise ServerFailed(f"ended with {self.process.returncode}: {self.last_line}")

    @property
    def last_line(self) -> str:
        """The last that it said that is not blank."""
        lines = self.log.read_text(errors="replace").splitlines()
        return next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")

    def pause(self) -> None:
        """Pause: none of its threads runs."""
        for one in self.look():
            _unless_gone(one.suspend)

    def resume(self) -> None:
        """Go on."""
        for one in self.look():
            _unless_gone(one.resume)

    def reset_peak(self) -> None:
        """Forget the peak of its memory."""
        for path in self._proc("clear_refs"):
            _unless_gone(partial(path.write_text, RESET_PEAK))

    def peak_bytes(self) -> int:
        """Sum of its processes' largest resident sets (VmHWM) since the reset; pages of two count in both."""
        told = [_unless_gone(path.read_text) or "" for path in self._proc("status")]
        peaks = [line for status in told for line in status.splitlines() if line.startswith("VmHWM")]
        return sum(int(line.split()[1]) * 1024 for line in peaks)

    def cpu_seconds(self) -> float:
        """Processor time of its processes."""
        times: list[Any] = [_unless_gone(one.cpu_times) for one in self.look()]
        return float(sum(one.user + one.system for one in times if one is not None))

    def stop(self) -> None:
        """End it and all that it started: SIGTERM to the first, then SIGKILL to whatever is left."""
        self.look()
        self.resume()
        if self.process.poll() is None:
            self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_SECONDS)
        for one in self.tree:
            _unless_gone(one.kill)
        self.process.wait()

    def _answers(self, path: str) -> bool:
        try:
            return httpx.get(f"{self.url}{path}", timeout=5, trust_env=False).status_code == 200
        except httpx.HTTPError:
            return False

    def _proc(self, name: str) -> Iterator[Path]:
        return (Path(f"/proc/{one.pid}/{name}") for one in self.look())


def start(name: str, command: list[str], port: int, environment: dict[str, str], log: Path) -> ServerProcess:
    """Start a server in a session of its own: Ctrl-C reaches only the bench, which ends it."""
    with log.open("wb") as lines:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=lines,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            start_new_session=True,
        )
    return ServerProcess(name, f"http://127.0.0.1:{port}", log, process)


def _unless_gone(ask: Callable[[], Answer]) -> Answer | None:
    try:
        return ask()
    except (psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
        return None
