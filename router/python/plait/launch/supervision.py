"""The workers of an engine, from their start to their end."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

from plait_proto import ExitCode

from plait._router import Engine
from plait.errors import StartError
from plait.http.engine import Phase, Status, read_status
from plait.http.streams import Streams
from plait.launch.lost_ranks import end_lost
from plait.launch.recovery import Recovery
from plait.launch.remote_ranks import num_own_ranks
from plait.launch.stopped_process import LOOK_SECONDS
from plait.launch.stopped_workers import StoppedWorkers
from plait.launch.worker import Worker
from plait.launch.workers import Workers
from plait.restarts import RestartBudget
from plait.settings import ServeSettings


class Supervision:
    """Starts the workers, watches them, starts lost ones again where a budget allows it, and ends them."""

    def __init__(
        self,
        engine: Engine,
        streams: Streams,
        settings: ServeSettings,
        config: Path,
        budget: RestartBudget | None,
        model: Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start the processes. `config` is their file, `environment` theirs (None: this process's).

        Call it on the event loop's thread: the kernel ends the processes with the thread that started them.
        """
        self._engine, self._streams = engine, streams
        self._budget, self._model, self._config = budget, model, config
        num_here = num_own_ranks(settings)
        self._workers = Workers(engine.endpoints, settings.process.tp, num_here, config, environment)
        steps_with_others = settings.process.dp_attention or settings.group.group_engines > 1
        self._stopped = StoppedWorkers(engine, self._workers, has_peers=settings.process.tp > 1 or steps_with_others)
        for worker in self._workers:
            self._watch(worker)

    async def wait_for_phase(self, *phases: Phase) -> Status:
        while (status := read_status(self._engine)).phase not in phases:
            self._stopped.look(status)
            await asyncio.sleep(LOOK_SECONDS)
        return status

    async def live(self) -> Status:
        """Look after the workers until the engine has stopped or failed."""
        watches = [asyncio.create_task(self._workers.end_lost_replicas(self._engine))]
        if self._budget is not None:
            recovery = Recovery(self._engine, self._workers, self._streams, self._budget, self._model, self._config)
            watches.append(asyncio.create_task(recovery.watch(self._watch)))
        try:
            return await self.wait_for_phase("stopped", "failed")
        finally:
            for watch in watches:
                watch.cancel()
            # No rank starts any more.
            await asyncio.gather(*watches, return_exceptions=True)

    async def end(self, last: Status, grace_seconds: float) -> None:
        """End the workers of an engine that was closed; so long may they take to exit by themselves unless it failed.

        `last` is what it said before.
        """
        if last.phase == "failed":
            await end_lost(self._workers, last.reason)
        else:
            await asyncio.gather(*(worker.shutdown(grace_seconds) for worker in self._workers))

    def failure(self, status: Status) -> StartError:
        """Why the engine failed. A worker's own exit code goes before the engine's, which knows only of a lost rank."""
        own = {ExitCode.SETTINGS, ExitCode.HARDWARE, ExitCode.MODEL_FILES}
        code = next((worker.exit_code for worker in self._workers if worker.exit_code in own), status.exit_code)
        return StartError(status.reason, ExitCode(code))

    def _watch(self, worker: Worker) -> None:
        worker.watch(asyncio.get_running_loop(), self._on_exit)

    def _on_exit(self, worker: Worker) -> None:
        if worker.was_killed:
            self._engine.worker_killed(worker.rank, worker.reason)
        elif worker.exit_code != 0 or read_status(self._engine).phase in ("loading", "ready"):
            self._engine.worker_lost(worker.rank, worker.reason)
