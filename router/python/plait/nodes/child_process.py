"""A process that the launcher starts: in a session of its own, with its lines read and without core files."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import signal
from collections.abc import Callable, Mapping, Sequence

MAX_LINE_BYTES = 1 << 16
LAST_LINES_SECONDS = 1.0
"""From the end of a process to the last of its lines."""

OnLine = Callable[[str], None]


class ChildProcess:
    """One process, from `run` to its end."""

    def __init__(
        self,
        words: Sequence[str],
        on_line: OnLine,
        environment: Mapping[str, str] | None = None,
        *,
        takes_input: bool = False,
    ) -> None:
        """`words` are the command line, `environment` replaces the launcher's."""
        self._stdin = asyncio.subprocess.PIPE if takes_input else asyncio.subprocess.DEVNULL
        self._words = words
        self._on_line = on_line
        self._environment = environment
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int | None:
        """None before its start and after its end, when the number may be another's."""
        process = self._process
        return process.pid if process is not None and process.returncode is None else None

    async def run(self) -> int:
        """Start it, and return its exit code once it has ended; negative for a signal."""
        process = self._process = await asyncio.create_subprocess_exec(
            *self._words,
            stdin=self._stdin,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
            limit=MAX_LINE_BYTES,
            env=self._environment,
        )
        # A core file of a process with GPUs has hundreds of GB.
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(process.pid, resource.RLIMIT_CORE, (0, 0))
        reading = [asyncio.create_task(self._read(pipe)) for pipe in (process.stdout, process.stderr) if pipe]
        code = await process.wait()
        await asyncio.wait(reading, timeout=LAST_LINES_SECONDS)
        return code

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal, if it runs."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def write(self, content: bytes) -> None:
        """Write to its standard input, if it runs."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.write(content)

    async def _read(self, pipe: asyncio.StreamReader) -> None:
        while True:
            try:
                line = await pipe.readline()
            except ValueError:  # longer than the limit, which drops it
                continue
            if not line:
                return
            self._on_line(line.decode(errors="replace").rstrip())
