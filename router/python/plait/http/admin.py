"""The admin listener's app: what an operator sees and does, apart from the API and its keys."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any, Protocol

import msgspec
from fastapi import FastAPI, Request, Response
from starlette.middleware import Middleware
from starlette.responses import StreamingResponse

from plait.http.admin_answers import (
    Draining,
    Ended,
    Flushed,
    Info,
    Level,
    LiveRequest,
    LiveRequests,
    Paused,
)
from plait.http.admin_bodies import DrainBody, json_response, read_body
from plait.http.admin_guard import RefuseOtherPages
from plait.http.admin_profile import Profiles, add_profile
from plait.http.app import add_error_shapes, health_problem, health_response, readiness_problem
from plait.http.auth import Admits, RequireKey
from plait.http.engine import Description, EngineHandle, read_status
from plait.http.errors import ApiError
from plait.http.openapi import METRICS_TYPE, describe
from plait.http.openapi_admin import admin_listener
from plait.http.pages import html_page
from plait.http.streams import Streams
from plait.live_view import read_values, view
from plait.version import version

VIEW_SECONDS = 0.5
_HINT = "see GET /admin/info; SIGTERM ends a server in any state"


class AdminEngine(EngineHandle, Protocol):
    """What operators ask of the engine; see `_router.pyi`."""

    def end_stream(self, stream: int) -> None: ...

    def flush_cache(self) -> None: ...

    def pause(self, is_paused: bool) -> None: ...

    def list_requests(self) -> bytes | None: ...

    def set_log_level(self, level: str) -> None: ...


class Admin(msgspec.Struct, frozen=True, kw_only=True):
    """What the app shows and steers."""

    engine: AdminEngine
    streams: Streams
    description: Description
    settings: dict[str, Any]
    """As the server was started, with the sizes that it chose."""
    url: str
    """Of the API."""
    metrics: Callable[[], bytes]
    drain: Callable[[float | None], None]
    """Drain; after so many seconds what still runs is ended."""
    keys: Admits | None
    profiles: Profiles | None
    """None without a folder for their traces."""


class _Listed(msgspec.Struct, frozen=True):
    """A choice as the engine lists it."""

    stream: int
    replica: int
    running: bool
    prompt_tokens: int
    output_tokens: int
    seconds: float


class _ListedReplicas(msgspec.Struct, frozen=True):
    requests: list[_Listed]
    silent_replicas: list[int]


def build_admin(admin: Admin) -> FastAPI:
    """The app; with keys every path but the probes and the empty page needs one."""
    middleware = [Middleware(RefuseOtherPages, has_keys=admin.keys is not None)]
    if admin.keys is not None:
        middleware.append(Middleware(RequireKey, keys=admin.keys, page_without_key=True))
    title = "Plait, for operators"
    app = FastAPI(title=title, version=version(), docs_url=None, redoc_url=None, middleware=middleware)
    _add_views(app, admin)
    _add_requests(app, admin)
    _add_actions(app, admin)
    add_profile(app, admin.profiles, partial(_require, admin.engine, "ready"))
    add_error_shapes(app)
    describe(app, admin_listener(has_keys=admin.keys is not None))
    return app


def _add_views(app: FastAPI, admin: Admin) -> None:
    began = time.monotonic()

    @app.get("/health")
    async def health() -> Response:
        return health_response(health_problem, read_status(admin.engine))

    @app.get("/ready")
    async def ready() -> Response:
        return health_response(readiness_problem, read_status(admin.engine))

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(admin.metrics(), media_type=METRICS_TYPE)

    page = html_page("live")

    @app.get("/")
    async def live() -> Response:
        return page

    @app.get("/admin/events")
    async def events() -> Response:
        return StreamingResponse(_views(admin), media_type="text/event-stream")

    @app.get("/admin/info")
    async def info() -> Response:
        told = Info(
            version=version(),
            url=admin.url,
            seconds=time.monotonic() - began,
            open_streams=len(admin.streams),
            profiling=admin.profiles is not None and admin.profiles.is_taken,
            model=admin.description,
            status=read_status(admin.engine),
        )
        return json_response(told)

    @app.get("/admin/settings")
    async def settings() -> Response:
        return json_response(admin.settings)


async def _views(admin: Admin) -> AsyncIterator[bytes]:
    """Until the engine has ended: the server waits for its open streams."""
    before, began = read_values(admin.metrics().decode()), time.monotonic()
    while read_status(admin.engine).phase not in ("stopped", "failed"):
        await asyncio.sleep(VIEW_SECONDS)
        values, now = read_values(admin.metrics().decode()), time.monotonic()
        yield b"data: " + msgspec.json.encode(view(before, values, now - began)) + b"\n\n"
        before, began = values, now


def _add_requests(app: FastAPI, admin: Admin) -> None:
    @app.get("/admin/requests")
    async def requests() -> Response:
        listed = await asyncio.to_thread(admin.engine.list_requests)
        if listed is None:
            raise ApiError(503, "the engine has not answered within 2 s; see /health, and try again")
        replicas = msgspec.json.decode(listed, type=_ListedReplicas)
        calls = live_requests(admin.streams, replicas.requests)
        return json_response(LiveRequests(requests=calls, silent_replicas=replicas.silent_replicas))

    @app.delete("/admin/requests/{request_id:path}")
    async def end(request_id: str) -> Response:
        found = [stream for stream, who in admin.streams.callers() if who.id == request_id]
        if not found:
            message = f"no request {request_id[:128]!r} is under way; GET /admin/requests lists those that are"
            raise ApiError(404, message)
        for stream in found:
            admin.engine.end_stream(stream)
        return json_response(Ended(ended=len(found)))


def live_requests(streams: Streams, listed: list[_Listed]) -> list[LiveRequest]:
    """Each call with what the engine says of its choices, in the order in which they came."""
    now = time.monotonic()
    calls = {
        stream: LiveRequest(id=who.id, path=who.path, key=who.key, seconds=now - who.began)
        for stream, who in streams.callers()
    }
    for choice in listed:
        if (call := calls.get(choice.stream)) is not None:
            _add_choice(call, choice)
    return list(calls.values())


def _add_choice(call: LiveRequest, choice: _Listed) -> None:
    call.state = "running" if choice.running or call.state == "running" else "waiting"
    call.replica = choice.replica
    call.num_choices += 1
    call.prompt_tokens = max(call.prompt_tokens, choice.prompt_tokens)
    call.output_tokens += choice.output_tokens


def _add_actions(app: FastAPI, admin: Admin) -> None:
    engine = admin.engine

    @app.post("/admin/flush_prefix_cache")
    async def flush() -> Response:
        engine.flush_cache()
        return json_response(Flushed())

    @app.post("/admin/pause")
    async def pause() -> Response:
        _require(engine, "ready")
        engine.pause(True)
        return json_response(Paused(paused=True))

    @app.post("/admin/resume")
    async def resume() -> Response:
        engine.pause(False)
        return json_response(Paused(paused=False))

    @app.post("/admin/drain")
    async def drain(request: Request) -> Response:
        asked = await read_body(request, DrainBody)
        _require(engine, "ready", "draining")
        admin.drain(asked.deadline_seconds)
        return json_response(Draining(draining=len(admin.streams)))

    @app.put("/admin/log_level")
    async def log_level(request: Request) -> Response:
        asked = await read_body(request, Level)
        engine.set_log_level(asked.level)
        return json_response(asked)


def _require(engine: AdminEngine, *phases: str) -> None:
    phase = read_status(engine).phase
    if phase not in phases:
        raise ApiError(409, f"the engine is {phase}, and does this only when it is {' or '.join(phases)}; {_HINT}")
