"""The OpenAPI document of a server: valid, of every route, with the limits that the engine holds."""

from __future__ import annotations

import importlib
import re
from typing import Any

import msgspec
import pytest
from fastapi import FastAPI
from jsonschema import Draft202012Validator
from plait.http.app import build_app
from plait.http.auth import ApiKeys
from plait.http.engine import read_description
from plait.http.engine_limits import Range
from plait.http.key_terms import KeyTerms
from plait.http.openapi import Served, describe
from plait.http.openapi_fields import bounded
from plait.http.streams import Streams
from plait.settings import HttpSettings
from plait_testing.in_memory_engine import InMemoryEngine
from starlette.routing import Route

CHAT = "/v1/chat/completions"
RIGHT: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "a"}]},
    "/v1/completions": {"prompt": "a"},
    "/v1/embeddings": {"input": "a"},
}


def app(keys: ApiKeys | None = None) -> FastAPI:
    engine = InMemoryEngine()
    return build_app(engine, Streams(engine, None), read_description(engine), keys, HttpSettings())


def document(keys: ApiKeys | None = None) -> dict[str, Any]:
    read: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(app(keys).openapi()))
    return read


def problems(path: str, body: object) -> list[str]:
    """What the document has against a body."""
    described = document()
    schema = described["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    validator = Draft202012Validator(schema | {"components": described["components"]})
    return [error.message for error in validator.iter_errors(body)]


def test_the_document_is_valid(description_tools: None) -> None:
    importlib.import_module("openapi_spec_validator").validate(document())


def test_every_route_is_described_and_no_other() -> None:
    routes = [route for route in app().routes if isinstance(route, Route)]
    served = {(re.sub(r":\w+}", "}", one.path), method.lower()) for one in routes for method in one.methods or ()}
    described = {(path, method) for path, methods in document()["paths"].items() for method in methods}
    assert len(routes) == len(app().routes)
    assert described == served


def test_a_route_that_nobody_described_is_an_error() -> None:
    other = FastAPI(docs_url=None, redoc_url=None)
    other.add_api_route("/other", lambda: None)
    with pytest.raises(KeyError, match="/other"):
        describe(other, Served((), None))


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"temperature": 100.5}),
        (CHAT, {"top_p": 0}),
        (CHAT, {"stop": [""]}),
        (CHAT, {"stop": ["a"] * 17}),
        (CHAT, {"logit_bias": {"1": 101}}),
        (CHAT, {"max_tokens": 0}),
        (CHAT, {"messages": []}),
        (CHAT, {"best_of": 2}),
        (CHAT, {"model": "another"}),
        ("/v1/completions", {"prompt": [1, "a"]}),
        ("/v1/completions", {"truncate_prompt_tokens": -2}),
        ("/v1/embeddings", {"dimensions": 0}),
    ],
)
def test_what_the_server_refuses_is_not_described(path: str, fields: dict[str, Any]) -> None:
    right = RIGHT[path]
    assert problems(path, right) == []
    assert problems(path, right | fields)


def test_what_is_only_counted_has_no_limits_of_an_answer() -> None:
    text = {"prompt": "a", "temperature": 1000}
    assert problems("/v1/completions", text)
    assert problems("/tokenize", text) == []


def test_a_limit_stands_with_each_type_that_it_is_for() -> None:
    text_or_texts = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
    text = {"type": "string", "minLength": 1, "maxLength": 2}
    texts = {"type": "array", "maxItems": 3, "items": text}
    assert bounded(text_or_texts, {"string": Range(1, 2), "array": Range(0, 3)}) == {"anyOf": [text, texts]}


def test_only_a_server_with_keys_asks_for_one() -> None:
    assert "401" not in document()["paths"][CHAT]["post"]["responses"]
    locked = document(ApiKeys({"secret": KeyTerms()}))
    assert locked["paths"][CHAT]["post"]["security"] == [{"bearer": []}, {"header": []}]
    assert "401" in locked["paths"][CHAT]["post"]["responses"]
    assert locked["paths"]["/health"]["get"]["security"] == []
