"""The key file and who is let in."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
from plait.errors import SettingsError
from plait.http.auth import MAX_KEY_FILE_BYTES, ApiKeys, RequireKey, read_keys
from plait.http.errors import ApiError
from plait.http.key_terms import KeyTerms
from plait.http.validate import read_chat
from plait.settings import Policy
from starlette.types import Message, Receive, Scope, Send


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text("first\n\n  second  \n")
    path.chmod(0o600)
    return path


def status_of(path: bytes, *headers: tuple[bytes, bytes], kind: str = "http", **settings: bool) -> int:
    """What a request to `path` gets from a door that `first` and `second` open."""
    sent: list[Message] = []

    async def inner(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200})

    async def receive() -> Message:
        return {"type": "http.request"}

    async def send(message: Message) -> None:
        sent.append(message)

    scope: dict[str, Any] = {"type": kind, "raw_path": path, "path": "/health", "headers": list(headers)}
    keys = ApiKeys({"first": KeyTerms(), "second": KeyTerms()})
    asyncio.run(RequireKey(inner, keys, **settings)(scope, receive, send))
    status: int = sent[0]["status"]
    return status


def bearer(key: bytes) -> tuple[bytes, bytes]:
    return (b"authorization", b"Bearer " + key)


def test_a_key_may_come_as_anthropics_clients_send_it() -> None:
    assert status_of(b"/v1/messages", (b"x-api-key", b"first")) == 200
    assert status_of(b"/v1/messages", (b"x-api-key", b"firs")) == 401
    assert status_of(b"/v1/messages", bearer(b"none"), (b"x-api-key", b"second")) == 200


def test_keys_are_the_lines_of_the_file(key_file: Path) -> None:
    assert list(read_keys(key_file)) == ["first", "second"]


def test_each_key_opens_and_nothing_else_does() -> None:
    assert status_of(b"/v1/models", bearer(b"first")) == 200
    assert status_of(b"/v1/models", bearer(b"second")) == 200
    for wrong in (b"", b"firs", b"first ever", b"FIRST", b"\xff"):
        assert status_of(b"/v1/models", bearer(wrong)) == 401
    assert status_of(b"/v1/models") == 401
    assert status_of(b"/v1/models", (b"authorization", b"Basic first")) == 401


@pytest.mark.parametrize(
    "path",
    [b"/metrics", b"/openapi.json", b"/nowhere", b"//health", b"/health/", b"/%68ealth", b"/READY", b"/ping/", b""],
)
def test_every_other_path_is_locked_whatever_the_router_would_make_of_it(path: bytes) -> None:
    assert status_of(path) == 401


@pytest.mark.parametrize("path", [b"/health", b"/ping", b"/ready"])
def test_probes_need_no_key(path: bytes) -> None:
    assert status_of(path) == 200


def test_metrics_without_a_key_open_that_path_alone() -> None:
    assert status_of(b"/metrics", metrics_without_key=True) == 200
    for path in (b"/metrics/", b"//metrics", b"/%6detrics", b"/v1/models", b"/openapi.json"):
        assert status_of(path, metrics_without_key=True) == 401


@pytest.mark.parametrize(
    ("content", "mode", "problem"),
    [
        (b"key\n", 0o604, "chmod 600"),
        (b"\n \n", 0o600, "holds no key"),
        ("schlüssel".encode(), 0o600, "not ASCII"),
        (b"key\nother\nkey weight=2\n", 0o600, "has a key twice"),
        (b"k" * (MAX_KEY_FILE_BYTES + 1), 0o600, "over 65536 bytes"),
    ],
)
def test_a_key_file_that_cannot_be_used_says_why(content: bytes, mode: int, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_bytes(content)
    path.chmod(mode)
    with pytest.raises(SettingsError, match=problem):
        read_keys(path)


def test_a_missing_key_file_says_so(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="cannot be read: No such file"):
        read_keys(tmp_path / "none")


def test_a_key_may_have_a_weight_and_a_best_priority(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("plain\nheavy weight=4\nboth\tpriority=-3   weight=2\nwith words\n")
    path.chmod(0o600)
    assert read_keys(path) == {
        "plain": KeyTerms(),
        "heavy": KeyTerms(weight=4),
        "both": KeyTerms(weight=2, priority=-3),
        "with words": KeyTerms(),
    }


@pytest.mark.parametrize(
    "line",
    [
        "key weight=0",
        "key weight=many",
        "key weight=2.0",
        "key priority=null",
        "key weight=",
        "key weight=1 weight=2",
        "key priority=high",
        "key wait=2 weight=2",
        "weight=2",
    ],
)
def test_a_term_out_of_range_is_an_error_that_names_the_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "keys"
    path.write_text(f"fine\n{line}\n")
    path.chmod(0o600)
    with pytest.raises(SettingsError, match=r"--api-key-file .* has a line with .*(weight|priority)"):
        read_keys(path)


@pytest.mark.parametrize(
    ("term", "policy", "advice"),
    [
        ("weight=2", "fcfs", "start with --policy fair,"),
        ("weight=2", "priority", "start with --policy fair,"),
        ("priority=1", "fcfs", "start with --policy priority or fair,"),
        ("priority=1", "cache-aware", "start with --policy priority or fair,"),
    ],
)
def test_a_term_that_the_policy_does_not_read_is_an_error(
    key_file: Path, term: str, policy: Policy, advice: str
) -> None:
    key_file.write_text(f"first\nsecond {term}\n")
    with pytest.raises(SettingsError, match=rf"`{term[:-1]}`, which --policy {policy} does not read; {advice}"):
        ApiKeys.from_file(key_file, policy)
    assert ApiKeys.from_file(key_file, "fair").admit(b"second") != KeyTerms()


def test_a_request_has_its_keys_weight_and_at_best_its_priority() -> None:
    asked = read_chat(b'{"messages": [{"role": "user", "content": "x"}], "priority": -2}', ("m",))
    silent = msgspec.structs.replace(asked, priority=0)
    assert KeyTerms().apply(asked) == asked
    assert KeyTerms(weight=3, priority=-2).apply(asked) == msgspec.structs.replace(asked, weight=3)
    assert KeyTerms(priority=7).apply(silent).priority == 7
    assert KeyTerms(priority=-5).apply(silent).priority == 0
    with pytest.raises(ApiError, match="`priority` is -2, where this API key may ask for -1 or more"):
        KeyTerms(priority=-1).apply(asked)
