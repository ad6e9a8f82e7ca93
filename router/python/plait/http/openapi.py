"""The OpenAPI document: each route that is served, with its body, its answers and its errors.

FastAPI knows nothing of bodies that structs decode and of answers that the engine writes. A route that no operation
describes is an error as the app is built.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

import msgspec
from fastapi import FastAPI
from starlette.routing import BaseRoute, Route

from plait.http import answer_bodies as answers
from plait.http import answer_items as items
from plait.http.auth import PROBES
from plait.http.errors import ERRORS, MESSAGES_PATH, is_of_messages
from plait.http.openapi_bodies import TEMPLATE, any_json, body_reference, body_schemas
from plait.http.openapi_fields import Schema

METRICS_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"
_JSON, _EVENTS = "application/json", "text/event-stream"
_TEXT: Schema = {"type": "string"}
_ANY_PATH = (400, 408, 431, 503)
"""What connections end with, whatever they ask for."""
_READING = (413, 429, 500)
_GENERATING = (*_READING, 404, 410, 504)


class Operation(NamedTuple):
    """A path's."""

    summary: str
    answer: Any
    """The type of its JSON."""
    errors: tuple[int, ...] = ()
    media: str = _JSON
    streams: bool = False


OPERATIONS: dict[str, Operation] = {
    "/": Operation("A page to chat with the model", None, media="text/html; charset=utf-8"),
    "/openapi.json": Operation("This document", answers.OpenDocument),
    "/v1/models": Operation("List the served model, by each of its names", answers.Models),
    "/v1/models/{model}": Operation("Describe a served model", answers.ModelCard, (404,)),
    "/v1/chat/completions": Operation("Answer a chat", answers.ChatAnswer, _GENERATING, streams=True),
    "/v1/completions": Operation("Continue prompts", answers.CompletionAnswer, _GENERATING, streams=True),
    "/v1/responses": Operation("Answer as OpenAI's Responses", items.ResponseAnswer, _GENERATING, streams=True),
    "/v1/responses/input_tokens": Operation("Count a response's input", answers.CountedResponse, (*_READING, 404)),
    MESSAGES_PATH: Operation("Answer as Anthropic's Messages", items.MessageAnswer, _GENERATING, streams=True),
    f"{MESSAGES_PATH}/count_tokens": Operation("Count a message's input", answers.CountedMessages, (*_READING, 404)),
    "/v1/embeddings": Operation("A vector for each input", answers.EmbeddingsAnswer, _GENERATING),
    "/tokenize": Operation("The tokens of a text or a chat", answers.Tokenized, (*_READING, 404)),
    "/detokenize": Operation("The text of tokens", answers.Detokenized, (*_READING, 404)),
    "/tokenizer_info": Operation("What a remote tokenizer needs to know", answers.TokenizerInfo, (429,)),
    "/health": Operation("The process runs and its engine steps, or idles without being stuck", answers.Health),
    "/ready": Operation("Requests are taken now", answers.Health),
    "/ping": Operation("As /health", answers.Health),
    "/metrics": Operation("Prometheus metrics", None, media=METRICS_TYPE),
    "/version": Operation("The server's version", answers.Version),
    "/load": Operation("Requests that are not answered yet", answers.Load),
}


class Served(NamedTuple):
    """What of a server its description tells."""

    models: tuple[str, ...]
    open_paths: frozenset[str] | None
    """Those that need no key; None if none does."""


def open_paths(also_open: Iterable[str]) -> frozenset[str]:
    """Paths without a key of a server with keys."""
    return frozenset(path.decode() for path in PROBES) | frozenset(also_open)


def describe(app: FastAPI, served: Served) -> None:
    """Give `app`, whose routes are complete, the document that `app.openapi()` returns."""
    document: Schema = {
        "openapi": app.openapi_version,
        "info": {"title": app.title, "version": app.version},
        "paths": _paths(app.routes, served),
        "components": _components(served),
    }
    if app.servers:
        document["servers"] = app.servers
    app.openapi = lambda: document  # type: ignore[method-assign]


def _paths(routes: list[BaseRoute], served: Served) -> dict[str, Schema]:
    paths: dict[str, Schema] = {}
    for route in routes:
        assert isinstance(route, Route)
        path = re.sub(r":\w+}", "}", route.path)
        for method in sorted(route.methods or ()):
            paths.setdefault(path, {})[method.lower()] = _operation(path, method, served)
    return paths


def _operation(path: str, method: str, served: Served) -> Schema:
    operation = OPERATIONS[path]
    has_keys = served.open_paths is not None and path not in served.open_paths
    failures = (*_ANY_PATH, *operation.errors, *((401,) if has_keys else ()))
    responses = {"200": _answer(operation)} | {str(status): _failure(path, status) for status in sorted({*failures})}
    described: Schema = {
        "operationId": "_".join([method.lower(), *re.findall(r"\w+", path)]),
        "summary": operation.summary,
        "responses": _without_content(responses) if method == "HEAD" else responses,
    }
    if (body := body_reference(path)) is not None:
        described["requestBody"] = {"required": True, "content": {_JSON: {"schema": body}}}
    if "{model}" in path:
        name = {"type": "string", "enum": [*served.models]}
        described["parameters"] = [{"name": "model", "in": "path", "required": True, "schema": name}]
    if served.open_paths is not None:
        described["security"] = [{"bearer": []}, {"header": []}] if has_keys else []
    return described


def _answer(operation: Operation) -> Schema:
    schema = _TEXT if operation.answer is None else _schemas((operation.answer,))[0][0]
    content: Schema = {operation.media: {"schema": schema}}
    if operation.streams:
        content[_EVENTS] = {}
    description = "The answer; with `stream` its events" if operation.streams else "The answer"
    return {"description": description, "headers": _headers("X-Request-Id"), "content": content}


def _failure(path: str, status: int) -> Schema:
    headers = ("X-Request-Id", "Retry-After") if status in (429, 503, 504) else ("X-Request-Id",)
    kind = answers.MessagesErrorAnswer if is_of_messages(path) else answers.ErrorAnswer
    either = [*_schemas((kind,))[0]]
    if kind is not answers.ErrorAnswer and status in _ANY_PATH:
        either += _schemas((answers.ErrorAnswer,))[0]
    schema = either[0] if len(either) == 1 else {"anyOf": either}
    return {"description": ERRORS[status].when, "headers": _headers(*headers), "content": {_JSON: {"schema": schema}}}


def _headers(*names: str) -> Schema:
    return {name: {"$ref": f"#/components/headers/{name}"} for name in names}


def _without_content(responses: dict[str, Schema]) -> dict[str, Schema]:
    return {status: {k: v for k, v in one.items() if k != "content"} for status, one in responses.items()}


def _schemas(types: tuple[Any, ...]) -> tuple[tuple[Schema, ...], dict[str, Schema]]:
    return msgspec.json.schema_components(types, schema_hook=any_json, ref_template=TEMPLATE)


def _components(served: Served) -> Schema:
    told = [operation.answer for operation in OPERATIONS.values() if operation.answer is not None]
    _, of_answers = _schemas((*told, answers.ErrorAnswer, answers.MessagesErrorAnswer))
    components: Schema = {
        "schemas": body_schemas(served.models) | of_answers,
        "headers": {
            "X-Request-Id": {"description": "The client's, or a new one", "schema": _TEXT},
            "Retry-After": {"description": "Seconds", "schema": {"type": "integer", "minimum": 1}},
        },
    }
    if served.open_paths is not None:
        components["securitySchemes"] = {
            "bearer": {"type": "http", "scheme": "bearer"},
            "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        }
    return components
