"""Workers whose process is stopped while others wait for them: while they start, or as one of several ranks."""

from __future__ import annotations

from plait._router import Engine
from plait.http.engine import ReplicaStatus, Status
from plait.launch.stopped_process import REASON, StoppedLooks
from plait.launch.workers import Workers


class StoppedWorkers:
    """Looks for them.

    A start would wait until its deadline, and ranks that have no more steps to compute wait for nobody: they notice
    nothing. The only rank of a replica that serves is left alone: its replica takes no requests until it goes on.
    """

    def __init__(self, engine: Engine, workers: Workers, has_peers: bool) -> None:
        """`has_peers`: a replica has several ranks, or steps together with others."""
        self._engine, self._workers, self._has_peers = engine, workers, has_peers
        self._looks = StoppedLooks()

    def look(self, status: Status) -> None:
        """Call it every `LOOK_SECONDS`."""
        for number, replica in enumerate(status.replicas):
            if self._has_peers or is_starting(replica):
                self._look_at(number, " while it started" if is_starting(replica) else "")

    def _look_at(self, number: int, when: str) -> None:
        for worker in self._workers.of_replica(number):
            if self._looks.add(worker.rank, is_stopped=worker.is_stopped):
                self._engine.worker_killed(worker.rank, f"worker {worker.rank} {REASON}{when}")


def is_starting(replica: ReplicaStatus) -> bool:
    """For the first time, or after a loss."""
    return replica.phase == "loading" or replica.down
