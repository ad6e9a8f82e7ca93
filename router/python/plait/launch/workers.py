"""The worker processes of all replicas, on this host."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from plait.http.engine import EngineHandle, Status, read_status
from plait.launch.lost_ranks import end_lost
from plait.launch.spares import Spares
from plait.launch.worker import Environment, Worker, start_rank
from plait.output import say

POLL_SECONDS = 0.1


class Workers:
    """One process a rank; ranks are numbered through the replicas."""

    def __init__(
        self,
        endpoints: Sequence[str],
        num_ranks: int,
        num_here: int,
        config: Path,
        environment: Environment = None,
    ) -> None:
        """Start the first `num_here` ranks of replicas with `num_ranks` each; they dial their replica's endpoint."""
        self.num_ranks = num_ranks
        """Of a replica."""
        self.environment = environment
        self._run_dir = config.parent
        starts = (
            (rank, start_rank(rank, endpoints[rank // num_ranks], config, environment)) for rank in range(num_here)
        )
        self._all = [Worker(rank, process) for rank, process in starts]

    def __iter__(self) -> Iterator[Worker]:
        """All of them, by rank."""
        return iter(self._all)

    async def end_lost_replicas(self, engine: EngineHandle) -> None:
        """Say which replicas were lost while others serve, and end what is left of their processes. Never returns."""
        known: set[int] = set()
        ends: list[asyncio.Task[None]] = []
        while True:
            status = read_status(engine)
            if status.phase not in ("stopped", "failed"):
                for number in set(status.failed_replicas) - known:
                    known.add(number)
                    say(_describe_loss(number, status))
                    lost = end_lost(self.of_replica(number), status.replicas[number].reason)
                    ends.append(asyncio.create_task(lost))
            await asyncio.sleep(POLL_SECONDS)

    def restart(self, number: int, endpoint: str, config: Path, spares: Spares) -> Iterator[Worker]:
        """Start new ranks in place of a replica's, which have ended; each is to be watched before the next starts."""
        # What its ranks met through: a store that the ended ones have filled.
        (self._run_dir / f"ranks-{number}").unlink(missing_ok=True)
        for rank in range(number * self.num_ranks, (number + 1) * self.num_ranks):
            worker = Worker(rank, spares.take(rank, endpoint, config) or self._start(rank, endpoint, config))
            self._all[rank] = worker
            yield worker

    def _start(self, rank: int, endpoint: str, config: Path) -> subprocess.Popen[bytes]:
        return start_rank(rank, endpoint, config, self.environment)

    def of_replica(self, number: int) -> list[Worker]:
        return self._all[number * self.num_ranks : (number + 1) * self.num_ranks]


def _describe_loss(number: int, status: Status) -> str:
    num_left = len(status.replicas) - len(status.failed_replicas)
    return f"Replica {number} was lost: {status.replicas[number].reason}; {num_left} of {len(status.replicas)} serve on"
