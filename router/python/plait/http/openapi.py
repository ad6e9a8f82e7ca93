"""OpenAPI documents: each route that an app serves, with its body, its answers and its errors.

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
from plait.http.auth import PROBES
from plait.http.errors import ERRORS, is_of_messages
from plait.http.openapi_bodies import TEMPLATE, any_json
from plait.http.openapi_fields import Schema

METRICS_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"
PAGE_TYPE = "text/html; charset=utf-8"
_JSON, _EVENTS = "application/json", "text/event-stream"
_TEXT: Schema = {"type": "string"}
ANY_PATH = (400, 408, 431, 503)
"""What connections end with, whatever they ask for."""


class Operation(NamedTuple):
    """A path's."""

    summary: str
    answer: Any
    """The type of its JSON."""
    errors: tuple[int, ...] = ()
    media: str = _JSON
    streams: bool = False
    event: Any = None
    """The type of each event's JSON, of a path that answers with nothing else."""


class Body(NamedTuple):
    """What a path reads."""

    schema: Schema
    is_required: bool = True


class Api(NamedTuple):
    """What an app serves."""

    operations: dict[str, Operation]
    bodies: dict[str, Body]
    schemas: dict[str, Schema]
    """Components that the bodies refer to."""
    parameters: dict[str, Schema]
    """Of the paths."""
    open_paths: frozenset[str] | None
    """Those that need no key; None if none does."""
    any_path: tuple[int, ...] = ANY_PATH
    """Errors of every path."""


def open_paths(also_open: Iterable[str]) -> frozenset[str]:
    """Paths without a key of a server with keys."""
    return frozenset(path.decode() for path in PROBES) | frozenset(also_open)


def describe(app: FastAPI, api: Api) -> None:
    """Give `app`, whose routes are complete, the document that `app.openapi()` returns."""
    document: Schema = {
        "openapi": app.openapi_version,
        "info": {"title": app.title, "version": app.version},
        "paths": _paths(app.routes, api),
        "components": _components(api),
    }
    if app.servers:
        document["servers"] = app.servers
    app.openapi = lambda: document  # type: ignore[method-assign]


def _paths(routes: list[BaseRoute], api: Api) -> dict[str, Schema]:
    paths: dict[str, Schema] = {}
    for route in routes:
        assert isinstance(route, Route)
        path = re.sub(r":\w+}", "}", route.path)
        for method in sorted(route.methods or ()):
            paths.setdefault(path, {})[method.lower()] = _operation(path, method, api)
    return paths


def _operation(path: str, method: str, api: Api) -> Schema:
    operation = api.operations[path]
    has_keys = api.open_paths is not None and path not in api.open_paths
    failures = {*api.any_path, *operation.errors, *((401,) if has_keys else ())}
    responses = {"200": _answer(operation)} | {str(status): _failure(path, status) for status in sorted(failures)}
    described: Schema = {
        "operationId": "_".join([method.lower(), *re.findall(r"\w+", path)]),
        "summary": operation.summary,
        "responses": _without_content(responses) if method == "HEAD" else responses,
    }
    if (body := api.bodies.get(path)) is not None:
        described["requestBody"] = {"required": body.is_required, "content": {_JSON: {"schema": body.schema}}}
    if names := re.findall(r"{(\w+)}", path):
        described["parameters"] = [_parameter(name, api.parameters[name]) for name in names]
    if api.open_paths is not None:
        described["security"] = [{"bearer": []}, {"header": []}] if has_keys else []
    return described


def _parameter(name: str, schema: Schema) -> Schema:
    return {"name": name, "in": "path", "required": True, "schema": schema}


def _answer(operation: Operation) -> Schema:
    description = "The answer; with `stream` its events" if operation.streams else "The answer"
    return {"description": description, "headers": _headers("X-Request-Id"), "content": _content(operation)}


def _content(operation: Operation) -> Schema:
    if operation.event is not None:
        name = _reference(operation.event)["$ref"]
        return {_EVENTS: {"schema": _TEXT | {"description": f"The data of each event is JSON: {name}"}}}
    content: Schema = {operation.media: {"schema": _TEXT if operation.answer is None else _reference(operation.answer)}}
    if operation.streams:
        content[_EVENTS] = {}
    return content


def _failure(path: str, status: int) -> Schema:
    headers = ("X-Request-Id", "Retry-After") if status in (429, 503, 504) else ("X-Request-Id",)
    kind = answers.MessagesErrorAnswer if is_of_messages(path) else answers.ErrorAnswer
    either = [_reference(kind)]
    if kind is not answers.ErrorAnswer and status in ANY_PATH:
        either.append(_reference(answers.ErrorAnswer))
    schema = either[0] if len(either) == 1 else {"anyOf": either}
    return {"description": ERRORS[status].when, "headers": _headers(*headers), "content": {_JSON: {"schema": schema}}}


def _headers(*names: str) -> Schema:
    return {name: {"$ref": f"#/components/headers/{name}"} for name in names}


def _without_content(responses: dict[str, Schema]) -> dict[str, Schema]:
    return {status: {k: v for k, v in one.items() if k != "content"} for status, one in responses.items()}


def _reference(kind: Any) -> Schema:
    return schemas_of((kind,))[0][0]


def schemas_of(types: tuple[Any, ...]) -> tuple[tuple[Schema, ...], dict[str, Schema]]:
    """The schema of each type, and the components that they refer to."""
    return msgspec.json.schema_components(types, schema_hook=any_json, ref_template=TEMPLATE)


def _components(api: Api) -> Schema:
    told = [kind for one in api.operations.values() for kind in (one.answer, one.event) if kind is not None]
    of_messages = [answers.MessagesErrorAnswer] if any(map(is_of_messages, api.operations)) else []
    _, of_answers = schemas_of((*told, answers.ErrorAnswer, *of_messages))
    components: Schema = {
        "schemas": api.schemas | of_answers,
        "headers": {
            "X-Request-Id": {"description": "The client's, or a new one", "schema": _TEXT},
            "Retry-After": {"description": "Seconds", "schema": {"type": "integer", "minimum": 1}},
        },
    }
    if api.open_paths is not None:
        components["securitySchemes"] = {
            "bearer": {"type": "http", "scheme": "bearer"},
            "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        }
    return components
