"""`plait serve`: one engine, its workers and the HTTP server, from start to exit code."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import signal
import socket
import time
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import uvloop

from plait._router import Engine
from plait.errors import DONE
from plait.http.admin import Admin
from plait.http.app import build_app
from plait.http.connection_limits import MAX_CONNECTIONS
from plait.http.engine import Description, Status, read_description, read_status
from plait.http.front_metrics import FrontMetrics
from plait.http.key_file import KeyFile
from plait.http.metrics_page import MetricsPage
from plait.http.request_log import OnEnd, log_request
from plait.http.server import http_server
from plait.http.streams import Streams
from plait.http.tls import TlsFiles, tls_files
from plait.http.trace_endpoint import open_traces
from plait.launch.admin_server import AdminServer, admin_keys, open_admin
from plait.launch.engine_start import open_engine, with_sizes, write_config
from plait.launch.group_place import group_place
from plait.launch.hash_key import cache_secrets
from plait.launch.listen import handed_over, listen, url
from plait.launch.listen_unix import listen_unix
from plait.launch.model_layout import check_model_layout
from plait.launch.profiles import RankProfiles, profile_folder
from plait.launch.rank_interface import set_rank_interface
from plait.launch.recovery import restart_budget, restart_file
from plait.launch.remote_ranks import AWAITED, remote_workers
from plait.launch.run_dir import run_directory
from plait.launch.startup_summary import print_startup_summary
from plait.launch.supervision import Supervision
from plait.launch.worker import TERM_SECONDS
from plait.model_files import find_model
from plait.output import say
from plait.restarts import RestartBudget, restart_file_held
from plait.settings import ServeSettings
from plait.shared_memory import note_for_ranks, shm_bytes

if TYPE_CHECKING:
    from plait.http.traces import Traces


def serve(
    model: str | None,
    settings: ServeSettings,
    environment: MutableMapping[str, str],
) -> int:
    """Serve `model` until a signal or a failure; the exit code. Raises `StartError`.

    `environment` is this process's; its children have it too.

    Cheap checks come first: keys, address, files. In a group the engine is ready when all engines of the group are
    there, and ends with them.
    """
    key_file = settings.http.api_key_file
    keys = KeyFile(Path(key_file), settings.scheduler.policy) if key_file is not None else None
    tls = tls_files(settings.tls)
    traces = open_traces(settings.traces)
    admin = admin_keys(settings.admin)
    traces_folder = profile_folder(settings)
    group = group_place(settings)
    remote = remote_workers(settings)
    set_rank_interface(
        environment,
        group,
        shares_experts=settings.process.dp_attention,
        rank_endpoint=settings.hosts.rank_endpoint,
    )
    secrets = cache_secrets(settings.process.kv_hash_key_file)
    with contextlib.ExitStack() as stack:
        handed = handed_over(environment, has_keys=keys is not None)
        listener = stack.enter_context(handed or _listen(settings, has_keys=keys is not None))
        admin_listener = open_admin(settings.admin, has_keys=admin is not None)
        if admin_listener is not None:
            stack.enter_context(admin_listener)
            say(f"Admin listener: {url(admin_listener)}")
        local = find_model(model, settings.hub)
        stack.enter_context(restart_file_held(restart_file(settings)))
        budget = restart_budget(settings, local.path)
        if budget is not None:
            budget.delay_at_start(time.time())
        run_dir = stack.enter_context(run_directory())
        check_model_layout(str(local.path), settings.process)
        say(f"Loading {local.path}")
        settings, reason = with_sizes(settings, local, environment)
        scheduler = settings.scheduler
        say(f"  batches  {scheduler.max_seqs} requests at a time, {scheduler.max_batch_tokens} tokens a step: {reason}")
        if handed is not None:
            address = url(handed, has_tls=tls is not None)
            say(f"  note     {address} is systemd's socket; --host, --port and --uds are not read")
        if note := note_for_ranks(settings, shm_bytes()):
            say(f"  note     {note}")
        engine = stack.enter_context(open_engine(local, settings, run_dir, secrets.hash_key, group, remote))
        description = read_description(engine)
        config = write_config(engine, local, settings, description, run_dir, group)
        if remote is not None:
            say(f"{AWAITED}{config}")
        _allow_connections()
        service = _Service(
            engine,
            description,
            settings,
            keys,
            tls,
            listener,
            secrets.salt_key,
            budget,
            local.path,
            traces,
            environment,
        )
        if admin_listener is not None:
            profiles = RankProfiles(engine, settings, traces_folder, run_dir) if traces_folder is not None else None
            service.add_admin(admin_listener, admin, profiles)
        return uvloop.run(service.run(config))


@contextlib.contextmanager
def _listen(settings: ServeSettings, *, has_keys: bool) -> Iterator[socket.socket]:
    """The socket that the settings name."""
    path = settings.proxy.uds
    tcp = None if path is not None else listen(settings.http.host, settings.http.port, has_keys=has_keys)
    with tcp or listen_unix(Path(path or "")) as listener:
        yield listener


def _allow_connections() -> None:
    """Raise the soft limit on open files to what `MAX_CONNECTIONS` streams need, two each, beside operators' calls."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 3 * MAX_CONNECTIONS + 256
    if soft < wanted:
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard)
        )


class _Service:
    """Engine, workers and HTTP server while they run."""

    def __init__(
        self,
        engine: Engine,
        description: Description,
        settings: ServeSettings,
        keys: KeyFile | None,
        tls: TlsFiles | None,
        listener: socket.socket,
        salt_key: bytes,
        budget: RestartBudget | None,
        model: Path,
        traces: Traces | None,
        environment: Mapping[str, str],
    ) -> None:
        self._engine = engine
        self._description = description
        self._settings = settings
        self._listener = listener
        self._streams = Streams(engine, engine, settings.proxy.stream_comment_seconds or None)
        self._keys, self._tls, self._environment = keys, tls, environment
        pooling = settings.pooling.pooling
        self._front, self._traces = FrontMetrics(), traces
        self._metrics = _metrics_page(engine, description, keys, settings, self._front)
        self._app = build_app(
            engine,
            self._streams,
            description,
            keys,
            settings.http,
            salt_key,
            pooling,
            settings.proxy,
            self._metrics,
        )
        self._admin: AdminServer | None = None
        self._front.know(self._app.routes)
        self._http = http_server(
            self._app,
            on_end=list(self._watchers()),
            on_use=self._front.end_use if keys is not None else None,
            tls=tls.listening() if tls is not None else None,
        )
        self._url = url(listener, has_tls=tls is not None)
        self._budget, self._model = budget, model
        self._num_signals = 0
        self._deadline: asyncio.TimerHandle | None = None
        self._grace_seconds = TERM_SECONDS

    def _watchers(self) -> Iterator[OnEnd]:
        """Who is told of each answer."""
        yield self._front.end_request
        is_heard = self._settings.process.log_level in ("debug", "info")
        if self._settings.logs.enable_log_requests and is_heard:
            yield log_request
        if self._traces is not None:
            yield self._traces.end_request

    def add_admin(self, listener: socket.socket, keys: KeyFile | None, profiles: RankProfiles | None) -> None:
        """Serve operators on this socket too."""
        admin = Admin(
            engine=self._engine,
            streams=self._streams,
            description=self._description,
            settings=msgspec.to_builtins(self._settings),
            url=self._url,
            metrics=self._metrics.admin_text,
            drain=self._drain_within,
            keys=keys,
            profiles=profiles,
        )
        self._admin = AdminServer(admin, listener, keys)

    async def run(self, config: Path) -> int:
        """Run until the engine has stopped or failed; the exit code."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)
        self._streams.attach(loop)
        supervision = Supervision(
            self._engine, self._streams, self._settings, config, self._budget, self._model, self._environment
        )
        http = asyncio.create_task(self._http.serve(sockets=[self._listener]))
        watches = [asyncio.create_task(files.watch()) for files in (self._keys, self._tls) if files is not None]
        watches.append(asyncio.create_task(self._streams.hold_lines()))
        watches.append(asyncio.create_task(self._front.watch_lag()))
        if self._admin is not None:
            watches.append(asyncio.create_task(self._admin.watch_keys()))
            admin = asyncio.create_task(self._admin.serve())
        try:
            status = await self._live(supervision)
        finally:
            for watch in watches:
                watch.cancel()
            await self._end(supervision, http)
            if self._admin is not None:
                self._admin.end()
                await admin
        return _exit_code(status, supervision)

    async def _live(self, supervision: Supervision) -> Status:
        status = await supervision.wait_for_phase("ready", "draining", "stopped", "failed")
        if status.phase == "ready":
            print_startup_summary(self._description, status, self._settings, self._url)
        return await supervision.live()

    async def _end(self, supervision: Supervision, http: asyncio.Task[None]) -> None:
        """Write what the engine still has for clients, then stop the HTTP server and the workers."""
        last = read_status(self._engine)
        self._engine.close()
        self._streams.dispatch()
        self._http.should_exit = True
        await asyncio.gather(http, supervision.end(last, self._grace_seconds))
        self._streams.detach(asyncio.get_running_loop())
        if self._traces is not None:
            self._traces.close()

    def _on_signal(self) -> None:
        self._num_signals += 1
        phase = read_status(self._engine).phase
        # A group may already drain when the first signal arrives.
        delay = self._settings.http.shutdown_delay_seconds
        if self._num_signals == 1 and phase == "ready" and delay > 0:
            say(f"Leaving: /ready answers 503 for {delay:g} s, then the server drains (Ctrl-C again stops at once)")
            self._app.state.is_leaving = True
            asyncio.get_running_loop().call_later(delay, self._drain)
        elif self._num_signals == 1 and phase in ("ready", "draining"):
            self._drain()
        else:
            say("Stopping")
            if phase == "loading":
                self._grace_seconds = 0.0  # a loading worker does not read the engine's messages
            self._engine.close()

    def _drain_within(self, seconds: float | None) -> None:
        """Drain; after so many seconds what still runs is ended. The last call's deadline counts."""
        self._drain()
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        if seconds is not None:
            self._deadline = asyncio.get_running_loop().call_later(seconds, self._engine.close)

    def _drain(self) -> None:
        """Nothing once the engine is ending."""
        if read_status(self._engine).phase in ("ready", "draining"):
            say(f"Draining: {len(self._streams)} requests in flight (Ctrl-C again stops at once)")
            self._engine.drain()


def _metrics_page(
    engine: Engine, description: Description, keys: KeyFile | None, settings: ServeSettings, front: FrontMetrics
) -> MetricsPage:
    page_size = settings.pages.page_size
    assert page_size is not None, "with_sizes fills it in"
    return MetricsPage(
        engine=engine,
        keys=keys,
        model=description.model_id,
        page_size=page_size,
        front=front,
        has_vllm_names=settings.metrics.metric_names == "plait,vllm",
    )


def _exit_code(status: Status, supervision: Supervision) -> int:
    """The exit code; raises `StartError` for a failure."""
    if status.phase != "stopped":
        raise supervision.failure(status)
    say("Stopped" + "".join(f"; replica {number} was lost before" for number in status.failed_replicas))
    return DONE
