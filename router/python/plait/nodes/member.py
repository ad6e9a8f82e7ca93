"""The launcher of any other node: it does what the head says, and ends when the head is gone."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Sequence

from plait_proto import UNDECODABLE, ExitCode

from plait.errors import SettingsError, StartError
from plait.nodes import messages
from plait.nodes.all_reduce_check import AllReduceCheck
from plait.nodes.channel import Dialler, Listener
from plait.nodes.engine_process import EngineProcess
from plait.nodes.head import HEARTBEAT_SECONDS, LAST_WORD_SECONDS, LOST_SECONDS, POLL_SECONDS, STALL_SECONDS
from plait.nodes.key_files import NodeKeys
from plait.nodes.log_lines import LogWriter, read_line
from plait.nodes.messages import Cause
from plait.nodes.place import with_port
from plait.nodes.plan import LaunchPlan
from plait.nodes.probes import answer_probes, probe
from plait.nodes.rank_processes import RankProcesses
from plait.nodes.signals import StopRequests
from plait.output import say

JOIN_SECONDS = 1.0
"""From one Join to the next, until the head answers."""
MAX_LINES = 500
"""Log lines of one message; more of one moment are dropped, and counted."""
MAX_LINES_BYTES = 1 << 20
"""The same of their size: the head ends a link that brings a larger message than `MAX_MESSAGE_BYTES`."""


class Member:
    """One run: from the meeting of the nodes to their common end."""

    def __init__(self, plan: LaunchPlan, keys: NodeKeys, log: LogWriter, requests: StopRequests) -> None:
        self._plan, self._keys, self._log, self._requests = plan, keys, log, requests
        head, port = plan.head_address, plan.place.head_port
        self._head = Dialler(keys, plan.node, 0, head, port)
        self._ranks = None if plan.layout.has_engine(plan.node) else RankProcesses(plan, keys, self._on_line)
        self._engine = self._ranks or EngineProcess(plan.words, self._on_line)
        self._check = AllReduceCheck(plan, lambda request: self._send(messages.StoreAsked(request)))
        self._probes = contextlib.ExitStack()
        """What answers the other nodes' probes."""
        self._lines: list[str] = []
        self._heard: float | None = None
        """When the head last said something; None: it has not yet."""
        self._num_closed_before = 0
        """Links that had closed when the head first answered: it does not know another than that one."""
        self._closed: float | None = None
        """When that one closed."""
        self._stop: messages.Stop | None = None
        self._work: set[asyncio.Task[None]] = set()

    async def run(self) -> messages.Stop:
        """Serve until the head says that all end; what it says. Raises `StartError` if keys or head are wrong."""
        loop = asyncio.get_running_loop()
        with self._head, self._probes:
            facts = await asyncio.to_thread(self._plan.facts, self._answer_probes())
            watching = loop.create_task(self._head.watch())
            tasks = [watching, loop.create_task(self._receive())]
            try:
                return await self._live(messages.Join(facts), watching)
            finally:
                await self._check.end()
                await self._engine.end()
                self._report_end()
                for task in [*tasks, *self._work]:
                    task.cancel()
                self._log.flush(all_lines=True)

    def _answer_probes(self) -> int:
        """Let other nodes try to reach this one until the preflight is passed; the port."""
        address = self._plan.address
        try:
            listener = self._probes.enter_context(Listener(self._keys, self._plan.node, address, 0))
        except OSError as error:
            raise SettingsError(
                f"node {self._plan.node} cannot listen at {address}: {error.strerror}; --node-address must be an "
                "address of this machine"
            ) from error
        self._probes.callback(asyncio.get_running_loop().create_task(answer_probes(listener)).cancel)
        return listener.port

    async def _live(self, join: messages.Join, watching: asyncio.Task[None]) -> messages.Stop:
        began = last_join = last_sent = polled = time.monotonic()
        where = with_port(self._plan.head_address, self._plan.place.head_port)
        say(f"Joining node 0 at {where} as node {self._plan.node} ({self._plan.place.said_by})")
        self._send(join)
        is_ready = has_ended = has_reduced = False
        while self._stop is None:
            await asyncio.sleep(POLL_SECONDS)
            now = time.monotonic()
            if self._heard is not None and now - polled > STALL_SECONDS:
                self._heard += now - polled
            polled = now
            if watching.done():
                watching.result()
            self._check_met(now, began, where)
            if (lost := self._lost_head(now, where)) is not None:
                return lost
            if self._heard is None and now - last_join > JOIN_SECONDS:
                self._send(join)
                last_join = now
            if now - last_sent > HEARTBEAT_SECONDS:
                self._send(messages.Alive())
                last_sent = now
            if self._check.reduced is not None and not has_reduced:
                has_reduced = True
                self._send(messages.HasReduced(self._check.reduced))
            if self._engine.url and not is_ready:
                is_ready = True
                self._send(messages.Ready())
            if self._engine.cause is not None and not has_ended:
                has_ended = True
                self._flush()
                self._report_end()
            self._flush()
            self._take_requests()
        return self._stop

    def _check_met(self, now: float, began: float, where: str) -> None:
        """Raises `StartError` if the head has not answered in time."""
        seconds = self._plan.settings.nodes.meet_timeout_seconds
        if self._heard is None and now - began > seconds:
            raise StartError(
                f"phase meet: node 0 at {where} has not answered for {seconds:g} s; start plait launch there, and let "
                "that TCP port through its firewall",
                ExitCode.RANK_LOST,
            )

    def _lost_head(self, now: float, where: str) -> messages.Stop | None:
        """What follows if it does not answer any more: with a policy of restarts this node waits for its return."""
        if (why := self._why_lost(now)) is None:
            return None
        reason = f"node 0 ({where}): {why}"
        is_restarted = self._plan.settings.nodes.restart != "never"
        return messages.Stop(Cause(code=int(ExitCode.RANK_LOST), reason=reason), 0.0 if is_restarted else None)

    def _why_lost(self, now: float) -> str | None:
        if self._heard is None:
            return None
        if self._closed is None and self._head.num_closed > self._num_closed_before:
            self._closed = now
        if self._closed is not None and now - self._closed > LAST_WORD_SECONDS:
            return "no word, its link closed; it ended or is cut off"
        if self._closed is None and now - self._heard > LOST_SECONDS:
            return f"no word for {LOST_SECONDS:g} s; it hangs or is stopped"
        return None

    async def _receive(self) -> None:
        while True:
            content = await self._head.receive()
            try:
                message = messages.decode(content)
            except UNDECODABLE:
                continue
            if self._heard is None:
                self._num_closed_before = self._head.num_closed
            self._heard = time.monotonic()
            match message:
                case messages.Probe(targets):
                    others = {node: where for node, where in targets.items() if node != self._plan.node}
                    task = asyncio.get_running_loop().create_task(self._probe(others))
                    self._work.add(task)
                case messages.ClockTick():
                    self._send(messages.ClockTick(time.time()))
                case messages.ReduceAll():
                    self._check.start()
                case messages.StoreAnswered(reply):
                    self._check.answer(reply)
                case messages.Load():
                    self._probes.close()
                    say("Preflight passed on all nodes; loading")
                    self._engine.start()
                case messages.StartRanks() if self._ranks is not None:
                    self._ranks.start_ranks(message)
                case messages.Drain():
                    self._engine.drain()
                case messages.Stop():
                    self._stop = message

    async def _probe(self, others: dict[int, tuple[str, int]]) -> None:
        self._send(messages.Probed(await probe(self._keys, self._plan.node, others)))

    def _take_requests(self) -> None:
        """Ctrl-C here drains all nodes by the head; a second one, or a lost terminal, ends this node at once."""
        if self._requests.num_signals > (0 if self._heard is None else 1):
            self._stop = messages.Stop(Cause(code=0, reason="stopped"))
        elif self._requests.num_signals == 1:
            self._send(messages.Drain())

    def _on_line(self, line: str) -> None:
        first = self._plan.layout.first_rank_of_engine(self._plan.node)
        self._log.add(read_line(line, self._plan.node, first))
        self._lines.append(line)

    def _flush(self) -> None:
        self._log.flush()
        if self._lines:
            self._send(lines_message(self._lines))
            self._lines = []

    def _report_end(self) -> None:
        self._send(messages.Ended(self._engine.cause or Cause(code=0, reason="it was stopped")))

    def _send(self, message: messages.Message) -> None:
        self._head.send(messages.encode(message))


def lines_message(lines: Sequence[str]) -> messages.Lines:
    """As many of them as a message takes, and how many are dropped."""
    sizes = itertools.accumulate(len(line.encode()) for line in lines[:MAX_LINES])
    num_kept = sum(size <= MAX_LINES_BYTES for size in sizes)
    return messages.Lines(list(lines[:num_kept]), len(lines) - num_kept)
