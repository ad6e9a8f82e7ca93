"""The FastAPI app: routes, authentication, and errors in OpenAI's form."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec
from fastapi import FastAPI, Request, Response
from msgspec import UNSET
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.routing import Route

from plait.http.answer_bodies import Health, Load, ModelCard, Models, Version
from plait.http.auth import Admits, RequireKey
from plait.http.body_reader import ServedNames
from plait.http.embeddings import embeddings_reader
from plait.http.engine import Description, EngineHandle, Phase, Status, read_status
from plait.http.errors import MESSAGES_PATH, ApiError, body_for, path_error
from plait.http.generate import GenerateRoute
from plait.http.generate import Reader as GenerateReader
from plait.http.identity import RANDOM_KEY
from plait.http.messages import read_message
from plait.http.metrics_page import MetricsPage
from plait.http.openapi import METRICS_TYPE, describe, open_paths
from plait.http.openapi_paths import front_door
from plait.http.origins import AllowOrigins
from plait.http.pages import html_page
from plait.http.quotas import Quotas
from plait.http.responses import read_response
from plait.http.root_path import TakeRootPath
from plait.http.streams import Streams
from plait.http.text_calls import (
    InfoRoute,
    TextRoute,
    count_message,
    read_detokenize,
    read_response_to_count,
    read_tokenize,
)
from plait.http.text_calls import Reader as TextReader
from plait.http.validate import read_chat, read_completion
from plait.proxy_settings import ProxySettings
from plait.settings import HttpSettings, Pooling
from plait.version import version

GENERATING: dict[str, GenerateReader] = {
    "/v1/chat/completions": read_chat,
    "/v1/completions": read_completion,
    "/v1/responses": read_response,
    MESSAGES_PATH: read_message,
}
TEXT_CALLS: dict[str, TextReader] = {
    "/tokenize": read_tokenize,
    "/detokenize": read_detokenize,
    "/v1/responses/input_tokens": read_response_to_count,
    f"{MESSAGES_PATH}/count_tokens": count_message,
}
_DEFAULTS = HttpSettings()
_NO_PROXY = ProxySettings()


def build_app(
    engine: EngineHandle,
    streams: Streams,
    description: Description,
    keys: Admits | None,
    http: HttpSettings = _DEFAULTS,
    salt_key: bytes = RANDOM_KEY,
    pooling: Pooling = "last",
    proxy: ProxySettings = _NO_PROXY,
    metrics: MetricsPage | None = None,
) -> FastAPI:
    """The app that serves `engine`; with `keys`, every path but `/health` and `/ready` needs one, unless
    `http` opens `/metrics`.

    `salt_key` keys the numbers that stand for clients, `pooling` makes embeddings, `metrics` is the page of that name
    (None: the engine's own). Once `state.is_leaving` is set,
    `/ready` answers 503.
    """
    app = FastAPI(
        title="Plait",
        version=version(),
        docs_url=None,
        redoc_url=None,
        middleware=[*_of_proxies(proxy), *_authentication(keys, http)],
        redirect_slashes=False,
        servers=[{"url": proxy.root_path}] if proxy.root_path is not None else None,
    )
    app.state.is_leaving = False
    quotas = Quotas()
    names = http.served_model_name or (description.model_id,)
    app.router.routes += [
        Route(path, GenerateRoute(reader, streams, names, http, salt_key, quotas), methods=["POST"])
        for path, reader in (GENERATING | {"/v1/embeddings": embeddings_reader(pooling)}).items()
    ]
    app.router.routes += [
        Route(path, TextRoute(call, streams, names, http, salt_key), methods=["POST"])
        for path, call in TEXT_CALLS.items()
    ]
    app.router.routes.append(Route("/tokenizer_info", InfoRoute(streams, http, salt_key), methods=["GET"]))
    _add_model_routes(app, names, description.max_model_len)
    _add_state_routes(app, engine, metrics.text if metrics is not None else engine.metrics)
    _add_probe_routes(app, engine, streams)
    add_error_shapes(app)
    if http.ui:
        _add_page(app)
    describe(app, front_door(names, None if keys is None else open_paths(_also_open(http))))
    return app


def _also_open(http: HttpSettings) -> list[str]:
    return [path for path, is_open in (("/metrics", http.metrics_without_key), ("/", http.ui)) if is_open]


def _add_page(app: FastAPI) -> None:
    page = html_page("chat")

    @app.get("/")
    async def chat() -> Response:
        return page


def _of_proxies(proxy: ProxySettings) -> list[Middleware]:
    """Before authentication: preflights have no key, and a key is asked for by the API's own paths."""
    root = [Middleware(TakeRootPath, root=proxy.root_path)] if proxy.root_path is not None else []
    return root + ([Middleware(AllowOrigins, origins=proxy.allowed_origins)] if proxy.allowed_origins else [])


def _authentication(keys: Admits | None, http: HttpSettings) -> list[Middleware]:
    if keys is None:
        return []
    return [Middleware(RequireKey, keys=keys, metrics_without_key=http.metrics_without_key, page_without_key=http.ui)]


def _add_model_routes(app: FastAPI, names: ServedNames, max_model_len: int) -> None:
    created = int(time.time())
    cards = {name: ModelCard(id=name, created=created, max_model_len=max_model_len) for name in names}

    @app.get("/v1/models")
    async def list_models() -> Response:
        return _json(200, msgspec.json.encode(Models(data=list(cards.values()))))

    @app.get("/v1/models/{model:path}")
    async def get_model(model: str) -> Response:
        if model not in cards:
            served = " or ".join(repr(name) for name in names)
            message = f"the model {model[:256]!r} is not served here; this server serves {served}, ask for that"
            raise ApiError(404, message, param="model", code="model_not_found")
        return _json(200, msgspec.json.encode(cards[model]))


def _add_state_routes(app: FastAPI, engine: EngineHandle, metrics_text: Callable[[], bytes]) -> None:
    @app.api_route("/health", methods=["GET", "HEAD"])
    async def health() -> Response:
        return health_response(health_problem, read_status(engine))

    @app.api_route("/ready", methods=["GET", "HEAD"])
    async def ready() -> Response:
        if app.state.is_leaving:
            raise ApiError(503, f"the server is about to drain; {_ADVICE['draining']}")
        return health_response(readiness_problem, read_status(engine))

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(metrics_text(), media_type=METRICS_TYPE)


def _add_probe_routes(app: FastAPI, engine: EngineHandle, streams: Streams) -> None:
    """What gateways ask vLLM's server for."""

    @app.get("/version")
    async def tell_version() -> Response:
        return _json(200, msgspec.json.encode(Version(version=version())))

    @app.api_route("/ping", methods=["GET", "HEAD", "POST"])
    async def ping() -> Response:
        return health_response(health_problem, read_status(engine))

    @app.get("/load")
    async def load() -> Response:
        return _json(200, msgspec.json.encode(Load(server_load=len(streams))))


_ADVICE: dict[Phase, str] = {
    "loading": "try again when /ready answers 200",
    "draining": "send requests to another server",
    "stopped": "start the server again",
    "failed": "its log says why, start the server again",
}


def health_problem(status: Status) -> str | None:
    """Why `/health` answers 503, or None."""
    if status.phase not in ("ready", "draining"):
        return status.reason or f"the engine is {status.phase}; {_ADVICE[status.phase]}"
    if status.down:
        return f"{status.reason}; the ranks start again, and requests wait for them"
    if status.hung:
        return "the engine has hung for a minute; restart the server if it does not recover"
    if status.stuck:
        return f"step {status.step} is overdue; restart the server if it stays so"
    return None


def readiness_problem(status: Status) -> str | None:
    """Why `/ready` answers 503, or None."""
    if status.phase == "draining":
        return f"the engine is draining; {_ADVICE['draining']}"
    if status.paused:
        return "an operator has paused the server; requests wait until it is resumed"
    return health_problem(status) or (
        "a worker's heartbeat is late; send requests to another server until it is back" if status.late else None
    )


def health_response(problem_of: Callable[[Status], str | None], status: Status) -> Response:
    """200, or 503 with what `problem_of` says."""
    if (problem := problem_of(status)) is not None:
        raise ApiError(503, problem)
    return _json(200, msgspec.json.encode(Health(replicas_lost=status.failed_replicas or UNSET)))


def add_error_shapes(app: FastAPI) -> None:
    """Give every error the form of its API."""

    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> Response:
        return _json(error.status, body_for(request.url.path, error.status, error.body()))

    @app.exception_handler(HTTPException)
    async def no_route(request: Request, error: HTTPException) -> Response:
        headers = dict(error.headers or {})
        rejection = path_error(
            error.status_code, request.method, request.url.path, headers.get("Allow", "another method")
        )
        return _json(error.status_code, body_for(request.url.path, error.status_code, rejection.body()), headers)

    @app.exception_handler(Exception)
    async def bug(request: Request, error: Exception) -> Response:
        body = ApiError(500, "a bug in the server; its log has the details").body()
        return _json(500, body_for(request.scope["path"], 500, body))


def _json(status: int, body: bytes, headers: dict[str, str] | None = None) -> Response:
    return Response(body, status, headers, media_type="application/json")
