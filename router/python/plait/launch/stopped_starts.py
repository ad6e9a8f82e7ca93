"""Workers that are stopped while they start: ranks that meet them would wait until the start's deadline."""

from __future__ import annotations

from collections import Counter

from plait._router import Engine
from plait.http.engine import Status
from plait.launch.workers import POLL_SECONDS, Workers

STOPPED_SECONDS = 5.0
"""A start with a worker that is stopped so long is given up."""


class StoppedStarts:
    """Looks for them. A worker that serves is left alone: its replica takes no requests until it goes on."""

    def __init__(self, engine: Engine, workers: Workers) -> None:
        self._engine, self._workers = engine, workers
        self._num_looks: Counter[int] = Counter()
        """In a row that found a rank's process stopped. A pause of this process was one of its workers too."""

    def look(self, status: Status) -> None:
        """Call it every `POLL_SECONDS`."""
        for number, replica in enumerate(status.replicas):
            if replica.phase == "loading" or replica.down:
                self._look_at(number)

    def _look_at(self, number: int) -> None:
        for worker in self._workers.of_replica(number):
            self._num_looks[worker.rank] = self._num_looks[worker.rank] + 1 if worker.is_stopped else 0
            if self._num_looks[worker.rank] * POLL_SECONDS >= STOPPED_SECONDS:
                self._num_looks[worker.rank] = 0
                reason = f"worker {worker.rank} was stopped (SIGSTOP, or a debugger) for {STOPPED_SECONDS:g} s"
                self._engine.worker_lost(worker.rank, f"{reason} while it started")
