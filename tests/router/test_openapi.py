"""The OpenAPI documents of a server: valid, of every route, with the limits that the engine holds."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from fastapi import FastAPI
from jsonschema import Draft202012Validator
from plait.http import openapi_admin, openapi_paths
from plait.http.admin import Admin, build_admin
from plait.http.app import build_app
from plait.http.auth import ApiKeys
from plait.http.engine import read_description
from plait.http.engine_limits import Range
from plait.http.key_terms import KeyTerms
from plait.http.openapi import describe
from plait.http.openapi_fields import bounded
from plait.http.openapi_paths import front_door
from plait.http.streams import Streams
from plait.settings import HttpSettings
from plait_testing.in_memory_engine import InMemoryEngine
from starlette.routing import Route

CHAT = "/v1/chat/completions"
KEYS = ApiKeys({"secret": KeyTerms()})
RIGHT: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "a"}]},
    "/v1/completions": {"prompt": "a"},
    "/v1/embeddings": {"input": "a"},
}


def app(keys: ApiKeys | None = None) -> FastAPI:
    engine = InMemoryEngine()
    return build_app(engine, Streams(engine, None), read_description(engine), keys, HttpSettings())


def admin_app(keys: ApiKeys | None = None) -> FastAPI:
    """The admin listener's; nothing of its engine is asked for to describe it."""
    engine: Any = InMemoryEngine()
    settings: dict[str, Any] = {"streams": Streams(engine, None), "description": read_description(engine)}
    settings |= {"settings": {}, "url": "", "metrics": engine.metrics, "drain": lambda seconds: None}
    return build_admin(Admin(engine=engine, keys=keys, profiles=None, **settings))


DescribedApp = Callable[[ApiKeys | None], FastAPI]
APPS = pytest.mark.parametrize("described_app", [app, admin_app])


def document(keys: ApiKeys | None = None, described_app: DescribedApp = app) -> dict[str, Any]:
    read: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(described_app(keys).openapi()))
    return read


def problems(path: str, body: object, described: dict[str, Any] | None = None, method: str = "post") -> list[str]:
    """What the document has against a body."""
    described = described or document()
    schema = described["paths"][path][method]["requestBody"]["content"]["application/json"]["schema"]
    validator = Draft202012Validator(schema | {"components": described["components"]})
    return [error.message for error in validator.iter_errors(body)]


@APPS
def test_the_document_is_valid(description_tools: None, described_app: DescribedApp) -> None:
    for keys in (None, KEYS):
        importlib.import_module("openapi_spec_validator").validate(document(keys, described_app))


@APPS
def test_every_route_is_described_and_no_other(described_app: DescribedApp) -> None:
    all_routes = described_app(None).routes
    routes = [route for route in all_routes if isinstance(route, Route)]
    served = {(re.sub(r":\w+}", "}", one.path), method.lower()) for one in routes for method in one.methods or ()}
    paths = document(None, described_app)["paths"]
    assert len(routes) == len(all_routes)
    assert {(path, method) for path, methods in paths.items() for method in methods} == served


@APPS
def test_no_operation_is_described_that_has_no_route(described_app: DescribedApp) -> None:
    operations = (openapi_paths if described_app is app else openapi_admin).OPERATIONS
    assert set(operations) == set(document(None, described_app)["paths"])


def test_a_route_that_nobody_described_is_an_error() -> None:
    other = FastAPI(docs_url=None, redoc_url=None)
    other.add_api_route("/other", lambda: None)
    with pytest.raises(KeyError, match="/other"):
        describe(other, front_door((), None))


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
    locked = document(KEYS)
    assert locked["paths"][CHAT]["post"]["security"] == [{"bearer": []}, {"header": []}]
    assert "401" in locked["paths"][CHAT]["post"]["responses"]
    assert locked["paths"]["/health"]["get"]["security"] == []


def test_an_admin_listener_with_keys_opens_its_probes_and_its_empty_page() -> None:
    paths = document(KEYS, admin_app)["paths"]
    is_open = {path for path, methods in paths.items() for one in methods.values() if one["security"] == []}
    assert is_open == {"/", "/health", "/ready"}
    assert all("403" in one["responses"] for methods in paths.values() for one in methods.values())


@pytest.mark.parametrize(
    ("method", "path", "right", "wrong"),
    [
        ("post", "/admin/drain", {"deadline_seconds": 60}, {"deadline_seconds": 86_401}),
        ("post", "/admin/profile", {"steps": 100}, {"steps": 101}),
        ("post", "/admin/profile", {}, {"step": 1}),
        ("put", "/admin/log_level", {"level": "info"}, {"level": "loud"}),
        ("put", "/admin/log_level", {"level": "debug"}, {}),
    ],
)
def test_what_an_admin_listener_refuses_is_not_described(
    method: str, path: str, right: dict[str, Any], wrong: dict[str, Any]
) -> None:
    described = document(None, admin_app)
    assert problems(path, right, described, method) == []
    assert problems(path, wrong, described, method)
