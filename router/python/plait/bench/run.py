"""One run: a load is sent to one server, each request when it is due."""

from __future__ import annotations

import signal
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from types import FrameType

import msgspec

from plait.bench.client_pool import ClientPool
from plait.bench.load import Load
from plait.bench.messages import Counting, FromClient, Go, Outcome, Report
from plait.bench.pace import ClosedLoop
from plait.bench.server import Server

LEAD_SECONDS = 0.05
"""From the begin of a run to its first due request."""
PROGRESS_SECONDS = 0.2
"""Longest wait between two updates of the progress bar."""


class Run(msgspec.Struct, frozen=True):
    """The record of a run; times in seconds of CLOCK_MONOTONIC."""

    load: Load
    server: str
    """Its URL."""
    position: int
    """Index of the server on the command line."""
    model: str
    seed: int
    streamed: bool
    counting: Counting
    begun: float
    ended: float
    outcomes: list[Outcome]
    reports: list[Report]
    is_partial: bool
    """It was interrupted."""
    num_unfinished: int
    """Requests in flight, or due and not sent, when it was interrupted."""

    @property
    def spans(self) -> list[tuple[float, float]]:
        """Begin and end of each request's time in flight. Those that had not ended count until the run's end."""
        unfinished = [(taken, max(taken, self.ended)) for report in self.reports for taken in report.in_flight]
        return [(outcome.taken, outcome.freed) for outcome in self.outcomes] + unfinished


Watch = Callable[[int, int], None]
"""Called with the numbers of requests that have ended and that are in flight."""


class Interrupt:
    """Ctrl-C as a flag: an exception could come between an outcome and its being counted.

    The second Ctrl-C raises, in case a client process is stuck.
    """

    def __init__(self) -> None:
        self.has_come = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handle the signal."""
        if self.has_come:
            signal.default_int_handler(number, frame)
        self.has_come = True


class Dispatcher:
    """Dispatches the requests of a run: waiting, in flight, ended."""

    def __init__(self, clients: ClientPool, load: Load, duration: float | None) -> None:
        self._clients = clients
        self._load = load
        self._closed = isinstance(load.case.pace, ClosedLoop)
        self._waiting: deque[int] = deque()
        self._num_known = 0
        self._freed: deque[float] = deque()
        """When slots became free that waiting requests may take."""
        self._num_in_flight = 0
        self.begun = monotonic() + LEAD_SECONDS
        self._stop_at = self.begun + duration if duration is not None and self._closed else float("inf")
        self.outcomes: list[Outcome] = []

    def run(self, watch: Watch, interrupted: Interrupt) -> None:
        """Send every request and wait until all have ended, or until Ctrl-C."""
        while not self._is_over() and not interrupted.has_come:
            self._release()
            for message in self._clients.poll(min(PROGRESS_SECONDS, max(0.0, self._next_due() - monotonic()))):
                self._take(message)
            watch(len(self.outcomes), self._num_in_flight)

    @property
    def num_unfinished(self) -> int:
        """Requests that were due and have not ended."""
        return self._num_in_flight + (0 if self._closed else len(self._waiting))

    def _is_over(self) -> bool:
        none_left = self._num_known == len(self._load.requests) and not self._waiting
        return self._num_in_flight == 0 and (none_left or monotonic() >= self._stop_at)

    def _next_due(self) -> float:
        if self._num_known == len(self._load.due):
            return float("inf")
        return self.begun + self._load.due[self._num_known]

    def _release(self) -> None:
        now = monotonic()
        while self._next_due() <= now:
            self._waiting.append(self._num_known)
            self._num_known += 1
        cap = self._load.case.pace.cap
        while self._waiting and (cap is None or self._num_in_flight < cap) and now < self._stop_at:
            self._send(self._waiting.popleft())

    def _send(self, index: int) -> None:
        intended = self.begun + self._load.due[index]
        freed = self._freed.popleft() if self._freed else None
        self._num_in_flight += 1
        if self._closed:
            self._clients.go(Go(index, None, freed))
        else:
            self._clients.go(Go(index, intended, max(intended, freed or 0.0)))

    def _take(self, message: FromClient) -> None:
        if isinstance(message, Outcome):
            self.outcomes.append(message)
            self._num_in_flight -= 1
            if self._waiting:
                self._freed.append(message.freed)


@contextmanager
def catch_interrupt() -> Iterator[Interrupt]:
    """Within the block the first Ctrl-C raises nothing. An ignored SIGINT stays ignored."""
    noted = Interrupt()
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, noted)
    try:
        yield noted
    finally:
        signal.signal(signal.SIGINT, before)


def send(clients: ClientPool, load: Load, server: Server, seed: int, duration: float | None, watch: Watch) -> Run:
    """Run `load`, which the clients already hold, to its end or until Ctrl-C."""
    sending = Dispatcher(clients, load, duration)
    with catch_interrupt() as interrupted:
        sending.run(watch, interrupted)
    ended = monotonic()
    unfinished = sending.num_unfinished
    reports, late = clients.finish()
    return Run(
        load=load,
        server=server.url,
        position=server.position,
        model=server.model,
        seed=seed,
        streamed=server.streams,
        counting=server.counting,
        begun=sending.begun,
        ended=ended,
        outcomes=sending.outcomes + late,
        reports=reports,
        is_partial=interrupted.has_come,
        num_unfinished=unfinished - len(late),
    )
