"""The ranks of a node whose engine is on the head: started, watched, and ended with it."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec
from plait_proto import ExitCode

from plait.errors import StartError
from plait.launch.kernel_cache import kernel_cache_words
from plait.launch.rank_end import LastLines, exit_code_of, reason_of
from plait.launch.rank_interface import set_rank_interface
from plait.launch.run_dir import run_directory
from plait.launch.stopped_process import LOOK_SECONDS, REASON, StoppedLooks, is_stopped
from plait.log import RankLines, writes_json
from plait.model_files import find_model
from plait.nodes.child_process import ChildProcess, OnLine
from plait.nodes.key_files import NodeKeys
from plait.nodes.messages import Cause, StartRanks
from plait.nodes.plan import LaunchPlan

KILL_SECONDS = 0.5
"""From SIGTERM, which ends a rank at once, to SIGKILL."""
REPORTS_SECONDS = 0.5
"""From the first rank's end to the node's cause: a rank that only reports the loss of another may end first."""
_LAST_LINE = re.compile(r".* ERROR rank \d+: (.*) \(exit code (\d+)\)")


class RankProcess:
    """One rank."""

    def __init__(self, rank: int, words: list[str], on_line: OnLine, environment: Mapping[str, str]) -> None:
        self.rank = rank
        self._on_line = on_line
        self.process = ChildProcess(words, self._take, environment)
        self._lines = LastLines()
        self._json = RankLines(rank, lambda line: on_line(line.decode().rstrip())) if writes_json() else None
        self._reason = ""

    async def run(self) -> Cause:
        """Why it ended."""
        code = await self.process.run()
        if code in (0, *ExitCode) and self._reason:
            is_report = code == ExitCode.RANK_LOST
            return Cause(code=code, reason=f"rank {self.rank}: {self._reason}", is_report=is_report)
        reason = f"rank {self.rank} {reason_of(code, self._lines)}"
        ours = exit_code_of(code, self._lines)
        return Cause(code=ours if ours >= 0 else int(ExitCode.RANK_LOST), reason=reason)

    @property
    def is_stopped(self) -> bool:
        """By SIGSTOP or a debugger."""
        return self.process.pid is not None and is_stopped(self.process.pid)

    def _take(self, line: str) -> None:
        self._lines.add(line)
        if found := _LAST_LINE.match(line):
            self._reason = found.group(1)
        if self._json is None:
            self._on_line(line)
        elif line:
            self._json.add_line(line)


class RankProcesses:
    """All ranks of this node. `url` stays empty: the head answers requests."""

    def __init__(self, plan: LaunchPlan, keys: NodeKeys, on_line: OnLine) -> None:
        self._plan, self._keys, self._on_line = plan, keys, on_line
        self._ranks: list[RankProcess] = []
        self._task: asyncio.Task[None] | None = None
        self.url = ""
        self.cause: Cause | None = None
        """Once they have ended, or one has failed."""

    def start(self) -> None:
        """They start once the head's engine listens."""

    def start_ranks(self, order: StartRanks) -> None:
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(order))

    def drain(self) -> None:
        """Their engine drains them."""

    async def end(self) -> None:
        """End them now; returns when they have ended."""
        if self._task is None:
            return
        for number in (signal.SIGTERM, signal.SIGKILL):
            for one in self._ranks:
                one.process.send_signal(number)
                one.process.send_signal(signal.SIGCONT)  # a stopped one takes no other signal
            done, _ = await asyncio.wait([self._task], timeout=KILL_SECONDS)
            if done:
                return
        await self._task

    async def _run(self, order: StartRanks) -> None:
        with run_directory() as folder:
            try:
                self._ranks = self._prepare(order, folder)
            except StartError as error:
                return self._fail([Cause(code=int(error.exit_code), reason=error.message)])
            except OSError as error:
                reason = f"the ranks cannot be started: {error}; free what ran out"
                return self._fail([Cause(code=int(ExitCode.HARDWARE), reason=reason)])
            looking = asyncio.create_task(self._look_for_stopped())
            try:
                await self._run_all()
            finally:
                looking.cancel()

    async def _run_all(self) -> None:
        running = {asyncio.create_task(one.run()) for one in self._ranks}
        causes: list[Cause] = []
        while running:
            done, running = await asyncio.wait(
                running, timeout=REPORTS_SECONDS if causes else None, return_when=asyncio.FIRST_COMPLETED
            )
            causes += [cause for task in done if (cause := task.result()).code != 0]
            if causes and (not done or any(not cause.is_report for cause in causes)):
                self._fail(causes)
        self._fail(causes or [Cause(code=0, reason="its ranks drained")])

    async def _look_for_stopped(self) -> None:
        """A rank that is stopped while it loads is not missed by its engine, which waits until the load's deadline."""
        looks = StoppedLooks()
        while True:
            for one in self._ranks:
                if looks.add(one.rank, is_stopped=one.is_stopped):
                    self._fail([Cause(code=int(ExitCode.RANK_LOST), reason=f"rank {one.rank} {REASON}")])
            await asyncio.sleep(LOOK_SECONDS)

    def _fail(self, causes: list[Cause]) -> None:
        if self.cause is None:
            self.cause = min(causes, key=lambda cause: cause.is_report)

    def _prepare(self, order: StartRanks, folder: Path) -> list[RankProcess]:
        config, keys = folder / "worker.json", folder / "keys.json"
        config.write_bytes(order.config)
        _write_secret(keys, self._link_keys())
        model = find_model(self._plan.model, self._plan.settings.hub).path
        ranks = self._plan.layout.ranks_of(self._plan.node)
        environment = dict(self._plan.environment)
        set_rank_interface(environment, None, shares_experts=False, rank_endpoint=order.endpoints[0])
        common = ["--config", str(config), "--keys", str(keys), "--model", str(model), "--parent", str(os.getpid())]
        common += kernel_cache_words(environment)
        endpoints = [order.endpoints[rank // self._plan.layout.tp] for rank in ranks]
        return [
            RankProcess(
                rank,
                [sys.executable, "-m", "plait_worker", "--connect", endpoint, "--rank", str(rank), *common],
                self._on_line,
                environment,
            )
            for rank, endpoint in zip(ranks, endpoints, strict=True)
        ]

    def _link_keys(self) -> bytes:
        public = self._keys.public
        keys = {"server": public[0], "public": public[self._plan.node], "secret": self._keys.secret}
        return msgspec.json.encode({name: key.decode() for name, key in keys.items()})


def _write_secret(path: Path, content: bytes) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as opened:
        opened.write(content)
