"""Browsers' origins, and the beginning that a proxy puts before paths."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from plait.check_settings import check_settings
from plait.errors import SettingsError
from plait.http.auth import ApiKeys
from plait.http.key_terms import KeyTerms
from plait.proxy_settings import ProxySettings
from plait.settings import ServeSettings
from plait.tls_settings import TlsSettings
from plait_testing.front_door import BODY, CHAT, Asking, Door, open_door
from plait_testing.in_memory_engine import LAST, record

PAGE = "https://chat.example.org"
PREFLIGHT = {
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization, content-type, x-stainless-os",
}
KEY = {"authorization": "Bearer sk-1"}


@pytest.fixture(scope="module")
def door() -> Iterator[Door]:
    proxy = ProxySettings(root_path="/llm", allowed_origins=(PAGE, "http://localhost:3000"))
    yield from open_door(ApiKeys({"sk-1": KeyTerms()}), proxy=proxy)


@pytest.fixture(scope="module")
def closed_door() -> Iterator[Door]:
    yield from open_door(ApiKeys({"sk-1": KeyTerms()}))


def preflight(door: Door, origin: str) -> httpx.Response:
    return httpx.options(door.url + CHAT, headers=PREFLIGHT | {"origin": origin}, timeout=60)


def test_a_preflight_of_a_listed_page_needs_no_key(door: Door) -> None:
    answer = preflight(door, PAGE)
    assert answer.status_code == 204
    assert answer.headers["access-control-allow-origin"] == PAGE
    assert answer.headers["access-control-allow-headers"] == PREFLIGHT["access-control-request-headers"]
    assert "POST" in answer.headers["access-control-allow-methods"]
    assert answer.headers["vary"] == "origin"
    assert "x-request-id" in answer.headers


def test_a_preflight_of_another_page_is_refused_by_name(door: Door) -> None:
    answer = preflight(door, "https://evil.example.org")
    assert answer.status_code == 403
    assert "'https://evil.example.org' may not ask this server" in answer.json()["error"]["message"]
    assert "access-control-allow-origin" not in answer.headers


def test_a_listed_page_reads_streams_and_errors(door: Door) -> None:
    with httpx.Client(headers=KEY | {"origin": PAGE}, timeout=60) as client:
        asking = Asking(door, CHAT, client, stream=True)
        door.engine.send(record(door.wait_for(1), b"data: [DONE]\n\n", LAST))
        streamed = asking.answer()
        refused = client.post(door.url + CHAT, json=BODY | {"messages": 5})
    assert (streamed.status_code, refused.status_code) == (200, 400)
    without_key = httpx.post(door.url + CHAT, json=BODY, headers={"origin": PAGE}, timeout=60)
    assert without_key.status_code == 401
    for answer in (streamed, refused, without_key):
        assert answer.headers["access-control-allow-origin"] == PAGE
        assert "retry-after" in answer.headers["access-control-expose-headers"]


def test_another_page_reads_nothing(door: Door) -> None:
    answer = httpx.get(door.url + "/v1/models", headers=KEY | {"origin": PAGE + ".evil.org"}, timeout=60)
    assert "access-control-allow-origin" not in answer.headers


def test_without_a_list_no_page_may_ask(closed_door: Door) -> None:
    answer = preflight(closed_door, PAGE)
    assert answer.status_code == 401
    assert "access-control-allow-origin" not in answer.headers


def test_a_star_lets_every_page_ask() -> None:
    for door in open_door(None, proxy=ProxySettings(allowed_origins=("*",))):
        assert preflight(door, "null").headers["access-control-allow-origin"] == "*"


@pytest.mark.parametrize("root", ["", "/llm"])
def test_paths_come_with_the_proxys_beginning_or_without(door: Door, root: str) -> None:
    assert httpx.get(f"{door.url}{root}/health", timeout=60).status_code == 200
    assert httpx.get(f"{door.url}{root}/v1/models", timeout=60).status_code == 401
    assert httpx.get(f"{door.url}{root}/v1/models", headers=KEY, timeout=60).json()["data"][0]["id"] == "tiny"


@pytest.mark.parametrize("path", ["/llm/llm/health", "/llmhealth", "/%6clm/health", "//llm/health"])
def test_other_spellings_of_an_open_path_need_the_key(door: Door, path: str) -> None:
    assert httpx.get(door.url + path, timeout=60).status_code == 401


def test_the_description_names_the_proxys_address(door: Door) -> None:
    document = httpx.get(door.url + "/llm/openapi.json", headers=KEY, timeout=60).json()
    assert document["servers"] == [{"url": "/llm"}]


@pytest.mark.parametrize("origin", ["chat.example.org", "https://x/", "https://x/path", "HTTPS://X", "/models/a", "x*"])
def test_a_word_that_is_no_origin_is_refused(origin: str) -> None:
    with pytest.raises(SettingsError, match=r"--allowed-origins has .* no origin"):
        check_settings(ServeSettings(proxy=ProxySettings(allowed_origins=(PAGE, origin))))


@pytest.mark.parametrize("root", ["llm", "/llm/", "//", "/a//b", "/a b", "/%6c", "/..", "/v1", "/v1/models"])
def test_a_root_path_that_cannot_be_told_apart_is_refused(root: str) -> None:
    with pytest.raises(SettingsError, match="--root-path is "):
        check_settings(ServeSettings(proxy=ProxySettings(root_path=root)))


def test_a_unix_socket_takes_no_certificate() -> None:
    settings = ServeSettings(tls=TlsSettings(ssl_certfile="x"), proxy=ProxySettings(uds="/run/plait/socket"))
    with pytest.raises(SettingsError, match="--uds and --ssl-certfile"):
        check_settings(settings)
