"""A node's engine in a process of its own, which ends with the launcher.

As a program: `python -m plait.nodes.engine_process PID serve ...` runs the command line as a child of process PID.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import re
import resource
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from plait_proto import ExitCode

from plait.errors import ADVICE
from plait.launch.remote_ranks import AWAITED
from plait.launch.startup_summary import READY
from plait.nodes.child_process import ChildProcess, OnLine
from plait.nodes.log_records import read_record, text_of
from plait.nodes.messages import Cause

KILL_SECONDS = 2.5
"""From the order to end at once to SIGKILL."""
_PR_SET_PDEATHSIG = 1
_LAST_LINE = re.compile(r"plait: [a-z ]+ error \(exit code (\d+)\): (.*)")


class EngineProcess:
    """`plait serve` on this node."""

    def __init__(self, words: Sequence[str], on_line: OnLine) -> None:
        """`on_line` gets each line that it says."""
        command = (sys.executable, "-m", "plait.nodes.engine_process", str(os.getpid()), *words)
        self._process = ChildProcess(command, self._take)
        self._on_line = on_line
        self._task: asyncio.Task[None] | None = None
        self._last_line: tuple[int, str] | None = None
        self.url = ""
        """Once it takes requests."""
        self.worker_config: Path | None = None
        """Once it waits for ranks of other nodes: their configuration."""
        self.cause: Cause | None = None
        """Once it has ended."""

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())

    def drain(self) -> None:
        """Let it answer what it has, then end."""
        self._process.send_signal(signal.SIGTERM)

    async def end(self) -> None:
        """End it now; returns when it has ended."""
        if self._task is None:
            return
        for _ in range(2):  # the second one ends a drain
            self._process.send_signal(signal.SIGTERM)
            await asyncio.sleep(0.1)
        try:
            await asyncio.wait_for(asyncio.shield(self._task), KILL_SECONDS)
        except TimeoutError:
            self._process.send_signal(signal.SIGKILL)
            await self._task

    async def _run(self) -> None:
        self.cause = self._describe_end(await self._process.run())

    def _take(self, line: str) -> None:
        record = read_record(line)
        if found := _LAST_LINE.match(line if record is None else text_of(record)):
            self._last_line = int(found.group(1)), found.group(2)
            return  # the launcher says it last
        if line.startswith(READY):
            self.url = line.removeprefix(READY)
        if line.startswith(AWAITED):
            self.worker_config = Path(line.removeprefix(AWAITED))
        self._on_line(line)

    def _describe_end(self, code: int) -> Cause:
        if code < 0:
            what = f"the engine was killed by {signal.Signals(-code).name}"
            return Cause(code=int(ExitCode.RANK_LOST), reason=what)
        if self._last_line is not None and self._last_line[0] == code:
            advice = ADVICE.get(ExitCode(code), "")
            return Cause(code=code, reason=self._last_line[1].removesuffix(f"; {advice}"))
        reason = "it drained" if code == 0 else f"the engine ended with exit code {code}"
        return Cause(code=code, reason=reason)


def main(argv: Sequence[str]) -> NoReturn:
    """Run `plait` with the words after the parent's number."""
    # A core file of a process with GPUs has hundreds of GB.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(argv[0]):  # it ended before
        sys.exit(int(ExitCode.RANK_LOST))
    from plait.cli import main as plait

    sys.argv = ["plait", *argv[1:]]
    plait()


if __name__ == "__main__":
    main(sys.argv[1:])
