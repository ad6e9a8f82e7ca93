"""OpenAPI of the raw ASGI routes, written by hand: FastAPI knows nothing of them.

The schemas come from the structs of `bodies`, which decode the requests. They state types; the limits of values are
the engine's.
"""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI

from plait.http.bodies import ChatBody, CompletionBody
from plait.http.embeddings import EmbeddingsBody
from plait.http.messages_body import CountTokensBody, MessagesBody
from plait.http.responses_body import ResponsesBody
from plait.http.text_calls import DetokenizeBody, TokenizeBody

_TEMPLATE = "#/components/schemas/{name}"
_BODIES: dict[str, type[msgspec.Struct]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/v1/embeddings": EmbeddingsBody,
    "/v1/responses": ResponsesBody,
    "/v1/responses/input_tokens": ResponsesBody,
    "/v1/messages": MessagesBody,
    "/v1/messages/count_tokens": CountTokensBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
}
_ANSWERS = {
    "200": {
        "description": "The answer, or with `stream` its events",
        "content": {"application/json": {}, "text/event-stream": {}},
    },
    "400": {"description": "A field is malformed or out of range"},
    "404": {"description": "The model is not served here"},
    "413": {"description": "The body is too large"},
    "429": {"description": "The queue is full; Retry-After says when to come back"},
    "503": {"description": "The server is loading, draining or broken"},
}


def add_generate_routes(app: FastAPI) -> None:
    """Add these routes to the document that `app.openapi()` returns."""
    rest = app.openapi

    def openapi() -> dict[str, Any]:
        document = rest()
        for path, body in _BODIES.items():
            document["paths"].setdefault(path, {"post": _operation(body)})
        _, schemas = msgspec.json.schema_components(
            tuple(_BODIES.values()), schema_hook=_anything, ref_template=_TEMPLATE
        )
        document.setdefault("components", {}).setdefault("schemas", {}).update(schemas)
        return document

    app.openapi = openapi  # type: ignore[method-assign]


def _operation(body: type[msgspec.Struct]) -> dict[str, Any]:
    (reference,), _ = msgspec.json.schema_components((body,), schema_hook=_anything, ref_template=_TEMPLATE)
    return {
        "summary": body.__doc__,
        "requestBody": {"required": True, "content": {"application/json": {"schema": reference}}},
        "responses": _ANSWERS,
    }


def _anything(_: type) -> dict[str, Any]:
    """The schema of `Json`."""
    return {"description": "any JSON"}
