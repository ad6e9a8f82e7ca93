"""One worker process: started, watched, and ended."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from plait.launch.kernel_cache import kernel_cache_words
from plait.launch.rank_end import LastLines, exit_code_of, reason_of
from plait.launch.stopped_process import is_stopped
from plait.log import RankLines, writes_json
from plait.output import forward_to_stderr, stderr_fd

TERM_SECONDS = 5.0
"""From SIGTERM to SIGKILL."""
FAILED_SECONDS = 1.5
"""From the engine's failure to SIGKILL: a rank that hears of it ends by itself within a second."""
SETTLE_SECONDS = 0.1
"""Without another thread: a rank has written where all of them are."""
MOST_SETTLES = 20
"""A rank that has written nothing by then does not get to it."""
STACK = "most recent call first"
"""In the line that Python writes above the calls of a thread."""

OnExit = Callable[["Worker"], None]


Environment = Mapping[str, str] | None
"""Of a process; None: this one's."""


def rank_words(rank: int, endpoint: str, config: Path, environment: Environment = None) -> list[str]:
    """The arguments of a rank's process, which is to have this environment."""
    words = ["--connect", endpoint, "--rank", str(rank), "--config", str(config), "--parent", str(os.getpid())]
    return words + kernel_cache_words(environment or {})


def start_rank(rank: int, endpoint: str, config: Path, environment: Environment = None) -> subprocess.Popen[bytes]:
    """Start the process of a rank. Raises `OSError` if the system has none left."""
    return start_process(rank_words(rank, endpoint, config, environment), subprocess.DEVNULL, environment)


def start_process(words: Sequence[str], stdin: int, environment: Environment = None) -> subprocess.Popen[bytes]:
    """Start `plait_worker` with these arguments. Raises `OSError` if the system has no process left."""
    return subprocess.Popen(
        [sys.executable, "-m", "plait_worker", *words],
        stdin=stdin,
        stdout=subprocess.PIPE if writes_json() else stderr_fd(),
        stderr=subprocess.STDOUT if writes_json() else subprocess.PIPE,
        start_new_session=True,
        env=environment,
    )


class Worker:
    """A rank's process, in its own session so that Ctrl-C reaches only the engine."""

    def __init__(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        """`process` is of `start_process`."""
        self.rank = rank
        self._process = process
        self._pidfd = os.pidfd_open(self._process.pid)
        self._lines = LastLines()
        self._num_stacks = 0
        self._json = RankLines(rank) if writes_json() else None
        self._exited = asyncio.Event()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """Negative for a signal, None while it runs."""
        code = self._process.returncode
        return None if code is None else exit_code_of(code, self._lines)

    @property
    def was_killed(self) -> bool:
        """From outside, before it could say anything."""
        return self._process.returncode == -signal.SIGKILL

    @property
    def reason(self) -> str:
        """How it ended, with its last line unless a signal killed it."""
        code, last = self._process.returncode, self._lines.last
        said = f"worker {self.rank} {reason_of(code, self._lines)}"
        return said if code < 0 or not last or said.endswith(last) else f"{said}: {last}"

    def watch(self, loop: asyncio.AbstractEventLoop, on_exit: OnExit) -> None:
        """Forward its lines to standard error, in the log's format, and call `on_exit` once when it has exited."""
        os.set_blocking(self._stderr, False)
        loop.add_reader(self._stderr, self._forward, loop)
        loop.add_reader(self._pidfd, self._reap, loop, on_exit)

    async def stop(self) -> None:
        """Send SIGTERM, then SIGKILL; returns when it has exited."""
        self._signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(self._exited.wait(), TERM_SECONDS)
        except TimeoutError:
            self._signal(signal.SIGKILL)
            await self._exited.wait()

    async def shutdown(self, grace_seconds: float) -> None:
        """Wait for it to exit by itself, then stop it."""
        try:
            await asyncio.wait_for(self._exited.wait(), grace_seconds)
        except TimeoutError:
            await self.stop()

    async def end_after_failure(self, seconds: float = FAILED_SECONDS) -> None:
        """Wait for it to exit by itself, then kill it. One that is stopped is killed at once: it cannot end."""
        try:
            await asyncio.wait_for(self._exited.wait(), 0.0 if self.is_stopped else seconds)
        except TimeoutError:
            self._signal(signal.SIGKILL)
            await self._exited.wait()

    async def write_stacks(self) -> str | None:
        """Let it write where its threads are to standard error, for as long as it runs; why it has not."""
        if self._process.returncode is not None:
            return None
        if self.is_stopped:
            return "its process is stopped (SIGSTOP, or a debugger)"
        heard_before = heard = self._num_stacks
        self._signal(signal.SIGUSR2)
        for _ in range(MOST_SETTLES):
            await asyncio.sleep(SETTLE_SECONDS)
            if self._exited.is_set() or heard_before < heard == self._num_stacks:
                return None
            heard = self._num_stacks
        return "its process waits in the kernel, or does not get to run"

    @property
    def is_stopped(self) -> bool:
        """By SIGSTOP or a debugger."""
        return is_stopped(self.pid)

    @property
    def _stderr(self) -> int:
        pipe = self._process.stderr or self._process.stdout
        if pipe is None:
            raise RuntimeError("the process was started with a pipe")
        return pipe.fileno()

    def _signal(self, number: signal.Signals) -> None:
        """Send it unless the process has just ended: its descriptor is closed then, and may be another's."""
        if self._process.returncode is None:
            signal.pidfd_send_signal(self._pidfd, number)

    def _forward(self, loop: asyncio.AbstractEventLoop) -> None:
        if not self._copy_lines():
            loop.remove_reader(self._stderr)

    def _copy_lines(self) -> bool:
        """Forward what the pipe holds; False at its end."""
        try:
            text = os.read(self._stderr, 65_536)
        except BlockingIOError:
            return True
        if self._json is not None:
            self._json.add(text)
        else:
            forward_to_stderr(text)
        for line in text.decode(errors="replace").split("\n"):
            self._lines.add(line)
            self._num_stacks += STACK in line
        return bool(text)

    def _reap(self, loop: asyncio.AbstractEventLoop, on_exit: OnExit) -> None:
        loop.remove_reader(self._pidfd)
        loop.remove_reader(self._stderr)
        self._process.wait()
        self._copy_lines()
        if self._json is not None:
            self._json.add(b"")
        os.close(self._pidfd)
        self._exited.set()
        on_exit(self)
