"""Schemas of the requests' bodies: from the structs that decode them, the limits and what is not supported."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from plait.http.bodies import ChatBody, CompletionBody
from plait.http.embeddings import EmbeddingsBody
from plait.http.messages_body import UNSUPPORTED_MESSAGES, CountTokensBody, MessagesBody
from plait.http.openapi_fields import ANSWERED_PROMPTS, OF_ANSWERS, OF_PROMPTS, PROMPTS, Bounds, Schema, bounded
from plait.http.responses_body import UNSUPPORTED_RESPONSES, ResponsesBody
from plait.http.text_calls import DetokenizeBody, TokenizeBody
from plait.http.unsupported import UNSUPPORTED_CHAT, UNSUPPORTED_COMPLETION, UNSUPPORTED_EMBEDDING, Neutral

TEMPLATE = "#/components/schemas/{name}"
_UNSUPPORTED: dict[str, Neutral] = {
    "ChatBody": UNSUPPORTED_CHAT,
    "CompletionBody": UNSUPPORTED_COMPLETION,
    "EmbeddingsBody": UNSUPPORTED_EMBEDDING,
    "ResponsesBody": UNSUPPORTED_RESPONSES,
    "MessagesBody": UNSUPPORTED_MESSAGES,
    "CountTokensBody": UNSUPPORTED_MESSAGES,
}


class Bodies(NamedTuple):
    """Of routes that read the same limits."""

    prefix: str
    """Of the components' names."""
    structs: tuple[type[msgspec.Struct], ...]
    bounds: dict[str, Bounds]
    replaced: dict[str, Schema]


GENERATING = Bodies(
    "",
    (ChatBody, CompletionBody, EmbeddingsBody, ResponsesBody, MessagesBody),
    OF_PROMPTS | OF_ANSWERS,
    ANSWERED_PROMPTS,
)
COUNTING = Bodies(
    "Counted",
    (ChatBody, CompletionBody, ResponsesBody, CountTokensBody, TokenizeBody, DetokenizeBody),
    OF_PROMPTS,
    PROMPTS,
)
"""What is only counted has no answer: its fields are read, and not held to their limits."""


def body_schemas(names: tuple[str, ...]) -> dict[str, Schema]:
    """The components of all bodies, for a server of these models."""
    return {name: schema for bodies in (GENERATING, COUNTING) for name, schema in _components(bodies, names).items()}


def _reference(struct: type[msgspec.Struct], bodies: Bodies = GENERATING) -> Schema:
    return {"$ref": TEMPLATE.format(name=bodies.prefix + struct.__name__)}


BODIES: dict[str, Schema] = {
    "/v1/chat/completions": _reference(ChatBody),
    "/v1/completions": _reference(CompletionBody),
    "/v1/embeddings": _reference(EmbeddingsBody),
    "/v1/responses": _reference(ResponsesBody),
    "/v1/responses/input_tokens": _reference(ResponsesBody, COUNTING),
    "/v1/messages": _reference(MessagesBody),
    "/v1/messages/count_tokens": _reference(CountTokensBody, COUNTING),
    "/tokenize": {
        "allOf": [
            _reference(TokenizeBody, COUNTING),
            {
                "anyOf": [
                    _reference(ChatBody, COUNTING),
                    {
                        "allOf": [
                            _reference(CompletionBody, COUNTING),
                            {"properties": {"messages": False, "prompt": {"type": "string"}}},
                        ]
                    },
                ]
            },
        ]
    },
    "/detokenize": _reference(DetokenizeBody, COUNTING),
}
"""By path."""


def _components(bodies: Bodies, names: tuple[str, ...]) -> dict[str, Schema]:
    template = TEMPLATE.format(name=bodies.prefix + "{name}")
    _, found = msgspec.json.schema_components(bodies.structs, schema_hook=any_json, ref_template=template)
    return {bodies.prefix + name: _stated(name, schema, bodies, names) for name, schema in found.items()}


def _stated(struct: str, schema: Schema, bodies: Bodies, names: tuple[str, ...]) -> Schema:
    properties = {
        name: _field(f"{struct}.{name}", name, one, bodies) for name, one in schema.get("properties", {}).items()
    }
    if "model" in properties:
        properties["model"] = {"enum": [*names, None], "default": None}
    unsupported = _UNSUPPORTED.get(struct, {})
    return schema | {"properties": {name: _neutral(values) for name, values in unsupported.items()} | properties}


def _field(full_name: str, name: str, schema: Schema, bodies: Bodies) -> Schema:
    if (replaced := bodies.replaced.get(full_name, bodies.replaced.get(name))) is not None:
        return replaced
    return bounded(schema, bodies.bounds.get(full_name, bodies.bounds.get(name, {})))


def _neutral(values: tuple[Any, ...]) -> Schema:
    return {"enum": [None, *values], "description": "Not supported; only values that change nothing are taken."}


def any_json(_: type) -> Schema:
    """The schema of `Json`."""
    return {"description": "any JSON"}
