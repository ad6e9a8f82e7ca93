"""Workers whose process is stopped while others wait for them: while they start, or as one of several ranks."""

from __future__ import annotations

from collections import Counter

from plait._router import Engine
from plait.http.engine import ReplicaStatus, Status
from plait.launch.workers import POLL_SECONDS, Workers

STOPPED_SECONDS = 5.0
"""A worker that is stopped so long is lost."""


class StoppedWorkers:
    """Looks for them.

    A start would wait until its deadline, and ranks that have no more steps to compute wait for nobody: they notice
    nothing. The only rank of a replica that serves is left alone: its replica takes no requests until it goes on.
    """

    def __init__(self, engine: Engine, workers: Workers, has_peers: bool) -> None:
        """`has_peers`: a replica has several ranks, or steps together with others."""
        self._engine, self._workers, self._has_peers = engine, workers, has_peers
        self._num_looks: Counter[int] = Counter()
        """In a row that found a rank's process stopped. A pause of this process was one of its workers too."""

    def look(self, status: Status) -> None:
        """Call it every `POLL_SECONDS`."""
        for number, replica in enumerate(status.replicas):
            if self._has_peers or is_starting(replica):
                self._look_at(number, " while it started" if is_starting(replica) else "")

    def _look_at(self, number: int, when: str) -> None:
        for worker in self._workers.of_replica(number):
            self._num_looks[worker.rank] = self._num_looks[worker.rank] + 1 if worker.is_stopped else 0
            if self._num_looks[worker.rank] * POLL_SECONDS >= STOPPED_SECONDS:
                self._num_looks[worker.rank] = 0
                reason = f"worker {worker.rank} was stopped (SIGSTOP, or a debugger) for {STOPPED_SECONDS:g} s"
                self._engine.worker_killed(worker.rank, reason + when)


def is_starting(replica: ReplicaStatus) -> bool:
    """For the first time, or after a loss."""
    return replica.phase == "loading" or replica.down
