"""Processes that have imported what a rank needs, so that lost ranks start without that."""

from __future__ import annotations

import os
import subprocess
from contextlib import suppress
from pathlib import Path

import msgspec

from plait.launch.worker import Environment, rank_words, start_process
from plait.output import say


class Spares:
    """As many as a replica has ranks. Each holds about 160 MB of memory, and nothing of a GPU."""

    def __init__(self, num_ranks: int, environment: Environment = None) -> None:
        self._num_ranks = num_ranks
        self._environment = environment
        self._waiting: list[subprocess.Popen[bytes]] = []
        self._has_failed = False

    @property
    def pids(self) -> list[int]:
        """Processes that wait."""
        return [process.pid for process in self._waiting]

    def fill(self) -> None:
        """Start those that are missing or have ended. A system that has no process left gets no more of them."""
        self._forget_ended()
        while len(self._waiting) < self._num_ranks and not self._has_failed:
            try:
                self._waiting.append(start_process(["--spare", str(os.getpid())], subprocess.PIPE, self._environment))
            except OSError as error:
                self._has_failed = True
                say(f"note: no spare processes for lost ranks: {error}")

    def _forget_ended(self) -> None:
        for process in [process for process in self._waiting if process.poll() is not None]:
            self._waiting.remove(process)
            _end(process)

    def take(self, rank: int, endpoint: str, config: Path) -> subprocess.Popen[bytes] | None:
        """Make one the process of a rank; None if none is left."""
        words = msgspec.json.encode(rank_words(rank, endpoint, config, self._environment)) + b"\n"
        while self._waiting:
            process = self._waiting.pop()
            pipe = process.stdin
            assert pipe is not None, "spares are started with a pipe"
            # One that was killed leaves a broken pipe.
            with suppress(OSError), pipe:
                pipe.write(words)
            if process.poll() is None:
                return process
            _end(process)
        return None

    def end(self) -> None:
        """End those that wait."""
        while self._waiting:
            _end(self._waiting.pop())


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            with suppress(OSError):
                pipe.close()
