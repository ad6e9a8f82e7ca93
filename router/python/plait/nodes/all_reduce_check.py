"""The preflight's all-reduce between the nodes: a process on each, whose store is the head's launcher."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Iterator

from plait_proto import UNDECODABLE, StoreOperation, StoreReply, StoreRequest
from plait_proto.all_reduce_check import ASKED, DONE, Reduced, decode_reduced, decode_request, encode_line

from plait.errors import StartError
from plait.launch.rank_interface import set_rank_interface
from plait.nodes.child_process import ChildProcess
from plait.nodes.engine_words import engine_endpoint
from plait.nodes.plan import LaunchPlan

SECONDS = 60.0
"""Until it is given up. Most of it is the import of torch from a cold disk."""
MAX_KEYS = 4096
"""Of the store, and requests that wait."""
MAX_VALUE_BYTES = 32 << 10
"""As in the engine's store."""


class AllReduceCheck:
    """This node's process. `reduced` is there once it has ended."""

    def __init__(self, plan: LaunchPlan, ask: Callable[[StoreRequest], None]) -> None:
        """`ask` is given what the process wants of the store; `answer` brings the reply."""
        words = ["--node", str(plan.node), "--nodes", str(plan.layout.num_nodes), "--seconds", f"{SECONDS:g}"]
        words += ["--device", "cuda" if plan.layout.has_gpus else "cpu", "--parent", str(os.getpid())]
        self._plan, self._ask = plan, ask
        self._command = [sys.executable, "-m", "plait_worker.all_reduce_check", *words]
        self._process: ChildProcess | None = None
        self._task: asyncio.Task[None] | None = None
        self._last_line = ""
        self.reduced: Reduced | None = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())

    def answer(self, reply: StoreReply) -> None:
        if self._process is not None:
            self._process.write(encode_line(reply) + b"\n")

    async def end(self) -> None:
        """End the process, if it runs."""
        if self._process is not None and self._task is not None:
            self._process.kill()
            await self._task

    async def _run(self) -> None:
        environment = dict(self._plan.environment)
        endpoint = engine_endpoint(self._plan.head_address, self._plan.place.head_port)
        try:
            set_rank_interface(environment, None, shares_experts=False, rank_endpoint=endpoint)
        except StartError as error:
            self.reduced = Reduced(problem=error.message)
            return
        self._process = ChildProcess(self._command, self._take, environment, takes_input=True)
        code = await self._process.run()
        if self.reduced is None:
            self.reduced = Reduced(problem=f"the check ended with exit code {code}: {self._last_line}")

    def _take(self, line: str) -> None:
        try:
            if line.startswith(ASKED):
                self._ask(decode_request(line.removeprefix(ASKED)))
            elif line.startswith(DONE):
                self.reduced = decode_reduced(line.removeprefix(DONE))
            else:
                self._last_line = line
        except UNDECODABLE as error:
            self._last_line = str(error)


class CheckStore:
    """The keys and values by which the processes find each other, at the head."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._waiting: list[StoreRequest] = []

    def ask(self, request: StoreRequest) -> Iterator[StoreReply]:
        """The replies that are due now, to whichever nodes wait for them; `rank` is the node."""
        if len(request.value) > MAX_VALUE_BYTES or max(len(self._values), len(self._waiting)) >= MAX_KEYS:
            yield _reply(request, None)
            return
        match request.operation:
            case StoreOperation.SET:
                self._values[request.key] = request.value
                yield _reply(request, b"")
            case StoreOperation.ADD:
                before = int(self._values.get(request.key, b"0"))
                self._values[request.key] = str(before + int.from_bytes(request.value, "little", signed=True)).encode()
                yield _reply(request, self._values[request.key])
            case StoreOperation.FIND:
                yield _reply(request, self._values.get(request.key))
            case StoreOperation.GET:
                self._waiting.append(request)
        due = [one for one in self._waiting if one.key in self._values]
        self._waiting = [one for one in self._waiting if one.key not in self._values]
        for one in due:
            yield _reply(one, self._values[one.key])


def _reply(request: StoreRequest, value: bytes | None) -> StoreReply:
    return StoreReply(request.rank, request.id, value)
