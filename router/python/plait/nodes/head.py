"""Node 0's launcher: it meets the others, checks all, starts all, and decides when and why all end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import msgspec
from plait_proto import UNDECODABLE, ExitCode, StoreRequest
from plait_proto.all_reduce_check import Reduced

from plait.launch.remote_ranks import rank_endpoints
from plait.nodes import messages
from plait.nodes.all_reduce_check import SECONDS as ALL_REDUCE_SECONDS
from plait.nodes.all_reduce_check import AllReduceCheck, CheckStore
from plait.nodes.causes import Causes, gave_up
from plait.nodes.channel import Connection, Listener
from plait.nodes.checks import (
    Finding,
    describe_reduced,
    find_faults,
    find_reduce_faults,
    first_cause,
    table_lines,
)
from plait.nodes.engine_process import EngineProcess
from plait.nodes.engine_words import engine_endpoint
from plait.nodes.loaded_ranks import LoadedRanks
from plait.nodes.log_lines import Line, LogWriter, Source, read_line
from plait.nodes.messages import Cause, Facts
from plait.nodes.place import with_port
from plait.nodes.plan import LaunchPlan
from plait.nodes.probes import answer_probes, probe
from plait.nodes.signals import StopRequests
from plait.output import say
from plait.restarts import RestartBudget

POLL_SECONDS = 0.05
HEARTBEAT_SECONDS = 0.5
LOST_SECONDS = 6.0
"""Without a word from a node whose link is open. Its launcher does nothing heavy, so that it hangs or is stopped."""
LAST_WORD_SECONDS = 0.2
"""From the end of a link until all that came through it was read."""
STALL_SECONDS = 0.5
"""A launcher that itself was not run for so long has not heard the others either: that time does not count."""
SETTLE_SECONDS = 1.0
"""From the first failure to the decision: a node's own cause may come after another node has noticed it."""
END_SECONDS = 6.0
"""From the decision to the end of the last node's engine."""
PREFLIGHT_MARGIN_SECONDS = 5.0
"""A node whose all-reduce takes too long says so itself."""
LOADED = "All ranks have their weights: next they compile kernels and capture steps"
LOAD_MARGIN_SECONDS = 30.0
"""An engine whose load takes too long ends by itself and names the rank; only then does the launcher."""


class EndError(Exception):
    """Something ends the server."""

    def __init__(self, cause: Cause) -> None:
        super().__init__(cause.reason)
        self.cause = cause


class Peer(msgspec.Struct):
    """Another node, as the head sees it."""

    connection: Connection
    facts: Facts
    heard: float
    closed: float | None = None
    """When its link closed: the node ended, or nothing reaches it any more."""
    clock: float | None = None
    """Seconds that it is ahead of this node's wall clock."""
    asked_clock: float = 0.0
    problems: dict[int, str | None] | None = None
    reduced: Reduced | None = None
    is_ready: bool = False
    cause: Cause | None = None
    """Once it has ended."""


class Head:
    """One run: from the meeting of the nodes to their common end."""

    def __init__(self, plan: LaunchPlan, listener: Listener | None, log: LogWriter, requests: StopRequests) -> None:
        """`listener` is None if there is one node alone."""
        self._plan, self._listener, self._log, self._requests = plan, listener, log, requests
        self._peers: dict[int, Peer] = {}
        self._engine = EngineProcess(plan.words, self._on_own_line)
        self._facts: Facts | None = None
        self._store = CheckStore()
        self._check: AllReduceCheck | None = None
        self._num_refused = 0
        self._causes = Causes(plan.layout)
        self._loaded = LoadedRanks(plan.layout)
        self._last_lines: dict[int, str] = {}
        """What each node said last."""
        self._has_served = self._is_draining = self._is_ending = False
        self._polled = time.monotonic()

    async def run(self, budget: RestartBudget) -> messages.Stop:
        """Serve until all nodes have ended; why, and whether all start again."""
        loop = asyncio.get_running_loop()
        tasks = [loop.create_task(self._send_heartbeats())]
        if self._listener is not None:
            self._listener.on_closed(self._note_closed)
            tasks.append(loop.create_task(self._receive(self._listener)))
        try:
            await self._meet_and_serve()
            cause = Cause(code=0, reason="all nodes drained")
        except EndError as end:
            cause = end.cause
        finally:
            for task in tasks[:1]:
                task.cancel()
        stop = messages.Stop(cause, self._restart_after(cause, budget))
        await self._end_all(stop)
        for task in tasks:
            task.cancel()
        self._log.flush(all_lines=True)
        return stop

    def _restart_after(self, cause: Cause, budget: RestartBudget) -> float | None:
        """Nothing starts again once somebody has asked for the end, whatever came between."""
        if self._requests.num_signals > 0:
            return None
        return budget.after_loss(cause.code, time.time(), has_served=self._has_served)

    async def _meet_and_serve(self) -> None:
        nodes = self._plan.settings.nodes
        await self._meet(nodes.meet_timeout_seconds)
        await self._preflight(nodes.preflight_timeout_seconds)
        began = time.monotonic()
        process = self._plan.settings.process
        await self._load(process.load_timeout_seconds + LOAD_MARGIN_SECONDS)
        rest = began + process.load_timeout_seconds - time.monotonic()
        await self._capture(min(process.capture_timeout_seconds, rest) + LOAD_MARGIN_SECONDS)
        say(f"All {self._plan.layout.num_nodes} nodes are ready after {time.monotonic() - began:.1f} s of loading")
        say(f"Plait is ready: {self._engine.url}")
        self._has_served = True
        await self._until(self._still_serving, None, "serve")

    # Phases

    async def _meet(self, seconds: float) -> None:
        others = range(1, self._plan.layout.num_nodes)
        if others:
            where = with_port(self._plan.head_address, self._plan.place.head_port)
            say(f"Waiting for {len(others)} of {len(others) + 1} nodes at {where}")
        await self._until(lambda: [node for node in others if node not in self._peers], seconds, "meet")

    async def _preflight(self, seconds: float) -> None:
        """Raises `EndError` for what would fail later."""
        plan = self._plan
        if plan.keys is None or self._listener is None:
            self._facts = await asyncio.to_thread(plan.facts, 0)
            own_problems: dict[int, str | None] = {}
        else:
            with Listener(plan.keys, plan.node, plan.address, 0) as probes:
                answering = asyncio.create_task(answer_probes(probes))
                self._facts = await asyncio.to_thread(plan.facts, probes.port)
                targets = {one.node: (one.address, one.probe_port) for one in self._all_facts()}
                self._tell_all(messages.Probe(targets))
                self._ask_clocks()
                others = {node: where for node, where in targets.items() if node != plan.node}
                own_problems = await probe(plan.keys, plan.node, others)
                await self._until(self._not_checked, seconds, "preflight")
                answering.cancel()
        found = self._find_faults(own_problems)
        if first_cause(self._all_facts(), found) is None and plan.layout.computes_across_nodes:
            reduced = await self._reduce_all(seconds)
            found += find_reduce_faults(reduced)
            if not reduced[0].problem:
                say(describe_reduced(reduced[0]))
        self._judge(found)

    async def _reduce_all(self, seconds: float) -> dict[int, Reduced]:
        """How an all-reduce between the nodes goes, as each sees it."""
        self._check = AllReduceCheck(self._plan, self._ask_store)
        self._check.start()
        self._tell_all(messages.ReduceAll())
        await self._until(self._not_reduced, max(seconds, ALL_REDUCE_SECONDS + PREFLIGHT_MARGIN_SECONDS), "preflight")
        outcomes = {node: peer.reduced for node, peer in self._peers.items()} | {0: self._check.reduced}
        return {node: reduced for node, reduced in outcomes.items() if reduced is not None}

    def _not_reduced(self) -> list[int]:
        own = [0] if self._check is not None and self._check.reduced is None else []
        return own + [node for node, peer in self._peers.items() if peer.reduced is None]

    def _ask_store(self, request: StoreRequest) -> None:
        for reply in self._store.ask(request):
            if reply.rank == self._plan.node and self._check is not None:
                self._check.answer(reply)
            elif reply.rank in self._peers:
                self._send(self._peers[reply.rank].connection, messages.StoreAnswered(reply))

    def _find_faults(self, own_problems: dict[int, str | None]) -> list[Finding]:
        nodes = self._all_facts()
        reached = {node: peer.problems or {} for node, peer in self._peers.items()}
        clocks = {node: peer.clock or 0.0 for node, peer in self._peers.items()}
        return find_faults(nodes, self._plan.layout, clocks, {**reached, self._plan.node: own_problems})

    def _judge(self, found: list[Finding]) -> None:
        """Print the table; raises `EndError` for a fault."""
        nodes = self._all_facts()
        say(f"Preflight of {len(nodes)} nodes")
        for line in table_lines(nodes, found):
            say(line)
        if cause := first_cause(nodes, found):
            raise EndError(cause)

    async def _load(self, seconds: float) -> None:
        self._tell_all(messages.Load())
        self._engine.start()
        if self._plan.layout.spans_nodes:
            began = time.monotonic()
            await self._until(self._not_listening, seconds, "load")
            self._tell_all(self._order_for_ranks())
            seconds -= time.monotonic() - began
        await self._until(self._not_loaded, seconds, "load")

    async def _capture(self, seconds: float) -> None:
        say(LOADED)
        await self._until(self._not_ready, seconds, "capture")

    def _not_listening(self) -> list[int]:
        """The head, until its engine listens for the ranks of other nodes."""
        return [self._plan.node] if self._engine.worker_config is None else []

    def _order_for_ranks(self) -> messages.StartRanks:
        config, plan = self._engine.worker_config, self._plan
        assert config is not None, "the engine listens"
        try:
            content = config.read_bytes()
        except OSError as error:  # the engine has ended
            raise EndError(Cause(code=int(ExitCode.RANK_LOST), reason=f"node 0: {config}: {error.strerror}")) from error
        endpoint = engine_endpoint(plan.head_address, plan.place.head_port)
        return messages.StartRanks(content, tuple(rank_endpoints(endpoint, plan.layout.dp)))

    def _not_checked(self) -> list[int]:
        return [node for node, peer in self._peers.items() if peer.problems is None or peer.clock is None]

    def _not_loaded(self) -> list[int]:
        return self._loaded.missing() if self._not_ready() else []

    def _not_ready(self) -> list[int]:
        own = [] if self._engine.url else [self._plan.node]
        if self._plan.layout.spans_nodes:
            return own  # its engine is ready once all ranks are
        return own + [node for node, peer in self._peers.items() if not peer.is_ready]

    async def _until(self, missing: Callable[[], list[int]], seconds: float | None, phase: str) -> None:
        """Wait until no node is missing. Raises `EndError` for a failure, a request to stop, and a deadline."""
        deadline = time.monotonic() + seconds if seconds is not None else None
        while True:
            self._forgive_own_stall()
            self._log.flush()
            self._note_refused()
            await self._check_failures()
            if not (nodes := missing()):
                return
            self._take_requests(phase)
            if deadline is not None and time.monotonic() > deadline:
                raise EndError(self._describe_deadline(phase, seconds or 0.0, sorted(nodes)))
            await asyncio.sleep(POLL_SECONDS)

    def _describe_deadline(self, phase: str, seconds: float, missing: list[int]) -> Cause:
        names = self._plan.describe_nodes(missing)
        advice = "look at their own lines" + "".join(
            f"; node {node} said last: {self._last_lines[node]}" for node in missing if node in self._last_lines
        )
        if phase == "meet":
            port = self._plan.place.head_port
            advice = f"start plait launch there too, and let TCP port {port} of this node through the firewalls"
            if refused := self._refused():
                advice += f"; refused for a key that is not listed: {', '.join(refused)}"
            if self._listener is not None and self._listener.num_strangers:
                advice += "; somebody tried with another public key of node 0: copy one public.keys to all nodes"
        return Cause(
            code=int(ExitCode.RANK_LOST), reason=f"phase {phase}: {names} missing after {seconds:g} s; {advice}"
        )

    # What the others say

    async def _receive(self, listener: Listener) -> None:
        while True:
            node, connection, content = await listener.receive()
            try:
                message = messages.decode(content)
            except UNDECODABLE:
                continue  # not from a launcher of this version; it will be missing
            self._take(node, connection, message)

    def _note_closed(self, descriptor: int) -> None:
        for peer in self._peers.values():
            if peer.connection.descriptor == descriptor and peer.closed is None:
                peer.closed = time.monotonic()

    def _take(self, node: int, connection: Connection, message: messages.Message) -> None:
        # A node that has ended before this one asks again once the next run listens.
        if isinstance(message, messages.Join) and message.facts.node == node and not self._is_ending:
            self._join(node, connection, message.facts)
        peer = self._peers.get(node)
        if peer is None or peer.connection != connection:
            return
        peer.heard = time.monotonic()
        match message:
            case messages.ClockTick(seconds):
                now = time.time()
                peer.clock = seconds - (peer.asked_clock + now) / 2
            case messages.Probed(problems):
                peer.problems = problems
            case messages.StoreAsked(request) if request.rank == node:
                self._ask_store(request)
            case messages.HasReduced(reduced):
                peer.reduced = reduced
            case messages.Ready():
                peer.is_ready = True
            case messages.Lines(lines, num_dropped):
                self._log_of(node, [*lines, f"{num_dropped} more lines were dropped"] if num_dropped else lines)
            case messages.Drain():
                self._requests.num_signals = max(1, self._requests.num_signals)
            case messages.Ended(cause):
                peer.cause = cause

    def _join(self, node: int, connection: Connection, facts: Facts) -> None:
        known = self._peers.get(node)
        if known is not None and known.closed is not None:
            return  # it starts again already, and asks until all meet anew
        if known is not None and known.facts.session != facts.session:
            both = f"{known.facts.host} ({known.facts.address}) and {facts.host} ({facts.address})"
            reason = f"two nodes say that they are node {node}: {both}; give each its own --node-rank"
            cause = Cause(code=int(ExitCode.SETTINGS), reason=reason)
            if self._has_served:  # a slip must not end what serves: the other one ends alone
                self._log.add(Line(Source(0, None), f"refused: {reason}", level="WARNING"))
            else:
                self._causes.add(0, cause)
            self._send(connection, messages.Stop(cause))
        elif known is None:
            self._peers[node] = Peer(connection, facts, time.monotonic())
            say(f"Node {node} is {facts.host} at {facts.address}: {facts.address_reason}")

    def _log_of(self, node: int, lines: list[str]) -> None:
        first = self._plan.layout.first_rank_of_engine(node)
        for line in lines:
            said = read_line(line, node, first)
            self._loaded.note(said)
            self._log.add(said)
            self._last_lines[node] = said.text if said.source.rank is None else f"rank {said.source.rank}: {said.text}"

    def _on_own_line(self, line: str) -> None:
        self._log_of(self._plan.node, [line])

    def _refused(self) -> list[str]:
        return self._listener.allowlist.refused if self._listener is not None else []

    def _note_refused(self) -> None:
        for address in self._refused()[self._num_refused :]:
            text = f"refused {address}: its key is not in public.keys"
            self._log.add(Line(Source(0, None), text, level="WARNING"))
        self._num_refused = len(self._refused())

    # Failures and ends

    def _take_requests(self, phase: str) -> None:
        """What Ctrl-C asks for, here or on another node: first a drain, then an end."""
        if self._requests.num_signals == 0:
            return
        if phase != "serve" or self._requests.num_signals > 1:
            raise EndError(Cause(code=0, reason="stopped"))
        if not self._is_draining:
            self._is_draining = True
            say("Draining all nodes (Ctrl-C again stops at once)")
            self._tell_all(messages.Drain())
            self._engine.drain()

    def _forgive_own_stall(self) -> None:
        now = time.monotonic()
        if (stalled := now - self._polled) > STALL_SECONDS:
            for peer in self._peers.values():
                peer.heard += stalled
        self._polled = now

    async def _check_failures(self) -> None:
        if not self._find_failures():
            return
        # Who says nothing will not explain itself.
        is_silence = all(node in self._peers and self._peers[node].cause is None for node in self._causes)
        deadline = time.monotonic() + (0.0 if is_silence else SETTLE_SECONDS)
        while time.monotonic() < deadline or (
            self._awaits_blamed_node() and time.monotonic() < deadline + LOST_SECONDS
        ):
            self._find_failures()
            await asyncio.sleep(POLL_SECONDS)
        node, cause = self._causes.root()
        raise EndError(self._named(node, cause))

    def _named(self, node: int, cause: Cause) -> Cause:
        host = self._peers[node].facts.host if node in self._peers else self._facts.host if self._facts else "the head"
        return Cause(code=cause.code, reason=f"node {node} ({host}): {cause.reason}")

    def _awaits_blamed_node(self) -> bool:
        """Whether the only cause so far names another node that ends too, or has stopped talking: it may be cut off."""
        node, cause = self._causes.root()
        blamed = self._causes.blamed_node(cause, node)
        if blamed is None or blamed in self._causes:
            return False
        peer = self._peers.get(blamed)
        return gave_up(cause) or (peer is not None and time.monotonic() - peer.heard > SETTLE_SECONDS)

    def _find_failures(self) -> bool:
        """Note new failures; whether there are any."""
        now = time.monotonic()
        for node, peer in self._peers.items():
            if peer.cause is not None and peer.cause.code != 0:
                self._causes.add(node, peer.cause)
            elif peer.cause is None and (reason := _why_lost(peer, now)) is not None:
                self._causes.add(node, Cause(code=int(ExitCode.RANK_LOST), reason=reason))
        own = self._engine.cause
        if own is not None and own.code != 0:
            self._causes.add(self._plan.node, own)
        return len(self._causes) > 0

    def _still_serving(self) -> list[int]:
        own = [self._plan.node] if self._engine.cause is None else []
        return own + [node for node, peer in self._peers.items() if peer.cause is None]

    async def _end_all(self, stop: messages.Stop) -> None:
        """Tell all nodes, and return when their engines have ended or the time is over."""
        self._is_ending = True
        self._tell_all(stop)
        if self._check is not None:
            await self._check.end()
        await self._engine.end()
        deadline = time.monotonic() + END_SECONDS
        while time.monotonic() < deadline and any(self._still_ends(peer) for peer in self._peers.values()):
            await asyncio.sleep(POLL_SECONDS)

    @staticmethod
    def _still_ends(peer: Peer) -> bool:
        return peer.cause is None and _why_lost(peer, time.monotonic()) is None

    # Sending

    async def _send_heartbeats(self) -> None:
        while True:
            self._tell_all(messages.Alive())
            await asyncio.sleep(HEARTBEAT_SECONDS)

    def _ask_clocks(self) -> None:
        for peer in self._peers.values():
            peer.asked_clock = time.time()
            self._send(peer.connection, messages.ClockTick(0.0))

    def _tell_all(self, message: messages.Message) -> None:
        for peer in self._peers.values():
            self._send(peer.connection, message)

    def _send(self, connection: Connection, message: messages.Message) -> None:
        if self._listener is not None:
            self._listener.send(connection, messages.encode(message))

    def _all_facts(self) -> list[Facts]:
        own = [self._facts] if self._facts is not None else []
        return own + [self._peers[node].facts for node in sorted(self._peers)]


def _why_lost(peer: Peer, now: float) -> str | None:
    """Why a node that has not said that it ends counts as lost; None: it does not."""
    if peer.closed is not None and now - peer.closed > LAST_WORD_SECONDS:
        return f"no word from {peer.facts.address}, its link closed; it ended or is cut off"
    if peer.closed is None and now - peer.heard > LOST_SECONDS:
        return f"no word from {peer.facts.address} for {LOST_SECONDS:g} s; it hangs or is stopped"
    return None
