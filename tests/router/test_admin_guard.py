"""Which requests the admin listener's guard lets through, by Host and Origin."""

from __future__ import annotations

import asyncio

import pytest
from plait.http.admin_guard import RefuseOtherPages
from starlette.responses import PlainTextResponse
from starlette.testclient import TestClient
from starlette.types import Message

OWN_ORIGIN = {"host": "127.0.0.1:9100", "origin": "http://127.0.0.1:9100"}
FOREIGN = [
    {"host": "evil.example:80"},
    {"host": "127.0.0.1.evil.example"},
    {"host": "[", "origin": "http://["},
    {"host": "["},
]


def status(headers: dict[str, str], *, has_keys: bool) -> int:
    guarded = RefuseOtherPages(PlainTextResponse("let through"), has_keys=has_keys)
    return TestClient(guarded).get("/", headers=headers).status_code


@pytest.mark.parametrize("host", ["localhost:1", "127.0.0.1:1", "[::1]:1", "192.168.0.7"])
def test_without_keys_it_is_asked_by_its_address(host: str) -> None:
    assert status({"host": host}, has_keys=False) == 200


@pytest.mark.parametrize("headers", FOREIGN)
def test_without_keys_another_name_is_refused(headers: dict[str, str]) -> None:
    assert status(headers, has_keys=False) == 403


def test_with_keys_any_name_is_taken() -> None:
    assert status({"host": "plait.example"}, has_keys=True) == 200


@pytest.mark.parametrize("has_keys", [False, True])
@pytest.mark.parametrize("origin", ["null", "http://127.0.0.1:9101", "http://[", "//a]b", "https://evil.example"])
def test_another_origin_is_refused(origin: str, has_keys: bool) -> None:
    assert status(OWN_ORIGIN | {"origin": origin}, has_keys=has_keys) == 403


def test_an_origin_without_a_host_is_refused() -> None:
    sent: list[int] = []

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            sent.append(message["status"])

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    guarded = RefuseOtherPages(PlainTextResponse("let through"), has_keys=True)
    scope = {"type": "http", "method": "GET", "path": "/", "headers": [(b"origin", b"null")]}
    asyncio.run(guarded(scope, receive, send))
    assert sent == [403]


@pytest.mark.parametrize("has_keys", [False, True])
def test_its_own_page_is_let_through(has_keys: bool) -> None:
    assert status(OWN_ORIGIN, has_keys=has_keys) == 200
