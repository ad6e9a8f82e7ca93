"""The ranks of a replica that was lost are started again, as far as the budget goes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import msgspec
from plait_proto import ExitCode, config_fingerprint, decode_config, encode_config

from plait._router import Engine
from plait.errors import SettingsError
from plait.http.engine import ReplicaStatus, Status, read_status
from plait.http.streams import Streams
from plait.launch.kept_files import KeptFiles
from plait.launch.lost_ranks import end_lost
from plait.launch.remote_ranks import num_own_ranks
from plait.launch.spares import Spares
from plait.launch.worker import Worker
from plait.launch.workers import POLL_SECONDS, Workers
from plait.output import say
from plait.restarts import RestartBudget
from plait.settings import ServeSettings

END_SECONDS = 0.3
"""From a replica's loss to SIGKILL for those of its ranks that go on."""
KEEP_ALIVE_SECONDS = 5.0
"""Between two comments on a stream that waits."""
MODEL_ENDINGS = (".json", ".safetensors", ".gguf")
INDEX = "model.safetensors.index.json"
"""Read instead of `model.safetensors` if it is there."""


def restart_file(settings: ServeSettings) -> str | None:
    """The file that is read and written; None without one."""
    return None if settings.restarts.restart == "never" else settings.restarts.restart_file


def restart_budget(settings: ServeSettings, model: Path) -> RestartBudget | None:
    """None: lost ranks are not started again. Raises `SettingsError` for settings that do not fit together."""
    restarts = settings.restarts
    if restarts.restart == "never":
        return None
    if (
        settings.group.group_engines > 1
        or settings.process.dp_attention
        or num_own_ranks(settings) != _num_ranks(settings)
    ):
        raise SettingsError(
            f"--restart {restarts.restart} is for replicas that step freely on one host; without it, `plait launch "
            "--restart` starts all nodes again"
        )
    return RestartBudget(
        restarts.restart, restarts.restart_budget, restarts.restart_file, model=str(model), is_first_at_once=True
    )


def _num_ranks(settings: ServeSettings) -> int:
    return settings.process.tp * settings.process.dp


class Recovery:
    """Watches the replicas of an engine."""

    def __init__(
        self, engine: Engine, workers: Workers, streams: Streams, budget: RestartBudget, model: Path, config: Path
    ) -> None:
        """`model` and `config` are the files that the first ranks read."""
        self._engine, self._workers, self._streams = engine, workers, streams
        self._budget = budget
        self._model, self._config = model, config
        self._kept = KeptFiles()
        self._files = _files(model)
        self._spares = Spares(workers.num_ranks, workers.environment)
        self._known_losses: dict[int, int] = {}
        self._restarts: dict[int, asyncio.Task[None]] = {}
        self._commented_at = 0.0

    async def watch(self, watch_worker: Callable[[Worker], None]) -> None:
        """Start lost ranks again; `watch_worker` gets each new one. Never returns; once cancelled it starts none."""
        try:
            while True:
                status = read_status(self._engine)
                for number, replica in enumerate(status.replicas):
                    self._look_at(number, replica, watch_worker)
                if not any(replica.down for replica in status.replicas):
                    self._spares.fill()
                self._keep_streams_alive(status)
                await asyncio.sleep(POLL_SECONDS)
        finally:
            for task in self._restarts.values():
                task.cancel()
            await asyncio.gather(*self._restarts.values(), return_exceptions=True)
            self._spares.end()

    def _look_at(self, number: int, replica: ReplicaStatus, watch_worker: Callable[[Worker], None]) -> None:
        if replica.late and not replica.down:
            self._report_stopped(number)
        if replica.losses <= self._known_losses.get(number, 0):
            return
        self._known_losses[number] = replica.losses
        if (task := self._restarts.get(number)) is not None:
            task.cancel()
        task = asyncio.create_task(self._restart(number, replica, watch_worker))
        task.add_done_callback(partial(self._give_up_after_bug, number))
        self._restarts[number] = task

    def _give_up_after_bug(self, number: int, task: asyncio.Task[None]) -> None:
        """The replica's streams would wait for ever."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._engine.give_up(number, f"its ranks cannot be started again: {type(error).__name__}: {error}")

    def _report_stopped(self, number: int) -> None:
        """A stopped rank sends nothing; the engine knows only that it is late."""
        for worker in self._workers.of_replica(number):
            if worker.is_stopped:
                self._engine.worker_killed(worker.rank, f"worker {worker.rank} is stopped (SIGSTOP, or a debugger)")
                return

    async def _restart(self, number: int, lost: ReplicaStatus, watch_worker: Callable[[Worker], None]) -> None:
        await end_lost(self._workers.of_replica(number), lost.reason, END_SECONDS)
        delay = self._delay()
        if isinstance(delay, str):
            self._engine.give_up(number, delay)
            return
        say(f"Replica {number} lost its ranks: {lost.reason}; they start again" + (f" in {delay:g} s" if delay else ""))
        await asyncio.sleep(delay)
        try:
            for worker in self._start(number, lost):
                watch_worker(worker)
        except OSError as error:
            self._engine.give_up(number, f"its ranks cannot be started again: {error}")

    def _start(self, number: int, lost: ReplicaStatus) -> Iterator[Worker]:
        raw = _with_pages(self._config.read_bytes(), lost)
        config = self._kept.write(self._config.with_name(f"worker-{number}.json"), raw)
        endpoint = self._engine.restart_ranks(number, config_fingerprint(raw))
        return self._workers.restart(number, endpoint, config, self._spares)

    def _delay(self) -> float | str:
        """Seconds to the next start, or why there is none."""
        try:
            changed = _changed(self._files, _files(self._model))
            delay = self._budget.after_loss(ExitCode.RANK_LOST, time.time())
        except OSError as error:
            return f"the model's files cannot be read: {error}"
        except SettingsError as error:
            return error.message
        if changed is not None:
            return f"{changed} has changed since the server started: start the server again"
        return "the restarts that --restart-budget allows within an hour are spent" if delay is None else delay

    def _keep_streams_alive(self, status: Status) -> None:
        """Proxies close connections on which nothing comes."""
        now = time.monotonic()
        if any(replica.down for replica in status.replicas) and now - self._commented_at >= KEEP_ALIVE_SECONDS:
            self._commented_at = now
            self._streams.comment()


def _with_pages(raw: bytes, lost: ReplicaStatus) -> bytes:
    """A worker's configuration with the pages that requests were promised, whatever memory is free by now."""
    config = decode_config(raw)
    num_snapshots = lost.slot_state.num_snapshots if lost.slot_state is not None else config.pages.num_snapshots
    pages = msgspec.structs.replace(config.pages, num_pages=lost.num_pages, num_snapshots=num_snapshots)
    return encode_config(msgspec.structs.replace(config, pages=pages))


def _files(model: Path) -> dict[str, tuple[int, int]]:
    """Size and time of change of the files that ranks may read."""
    files = sorted(model.iterdir()) if model.is_dir() else [model]
    found = ((file, file.stat()) for file in files if file.suffix in MODEL_ENDINGS and file.is_file())
    return {str(file): (stat.st_size, stat.st_mtime_ns) for file, stat in found}


def _changed(before: dict[str, tuple[int, int]], now: dict[str, tuple[int, int]]) -> str | None:
    """The first file that is not as it was. A new one counts only if ranks would read it."""
    new = {name for name in now if Path(name).name == INDEX}
    return next((name for name in sorted(before.keys() | new) if before.get(name) != now.get(name)), None)
