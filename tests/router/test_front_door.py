"""The HTTP server itself, over real sockets, with the engine's side in memory."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator

import httpx
import pytest
from openai.types.responses import ResponseErrorEvent
from plait.http import connection_limits as limits
from plait.http.auth import ApiKeys
from plait.http.key_terms import KeyTerms
from plait.settings import HttpSettings
from plait_testing.front_door import BODY, CHAT, Asking, Door, open_door, raw_chat
from plait_testing.in_memory_engine import LAST, TOO_SLOW, failure, record

ERROR = b'{"error":{"message":"no","type":"server_error","param":null,"code":null}}'


@pytest.fixture
def door() -> Iterator[Door]:
    yield from open_door(None)


@pytest.fixture
def locked_door() -> Iterator[Door]:
    yield from open_door(ApiKeys({"secret": KeyTerms(), "other": KeyTerms()}))


def error_of(response: httpx.Response) -> dict[str, str]:
    assert response.headers["content-type"] == "application/json"
    error: dict[str, str] = response.json()["error"]
    assert sorted(error) == ["code", "message", "param", "type"]
    return error


def test_a_stream_is_the_engines_bytes(door: Door) -> None:
    asking = Asking(door, stream=True)
    stream = door.wait_for(1)
    door.engine.send(record(stream, b"data: 1\n\n"))
    door.engine.send(record(stream, b"data: [DONE]\n\n", LAST))
    answer = asking.answer()
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.content == b"data: 1\n\ndata: [DONE]\n\n"
    assert door.engine.submitted[stream]["stream"] is True
    assert door.engine.aborted == []


def test_the_engine_gets_the_tenant_of_each_key_whatever_user_is_written(locked_door: Door) -> None:
    tenants = set()
    for number, (key, user) in enumerate([("secret", "ada"), ("secret", "bob"), ("other", "ada")], start=1):
        asking = Asking(locked_door, client=httpx.Client(headers={"authorization": f"Bearer {key}"}), user=user)
        stream = locked_door.wait_for(number)
        locked_door.engine.send(record(stream, b"{}", LAST))
        assert asking.answer().status_code == 200
        tenants.add((key, locked_door.engine.tenants[stream], locked_door.engine.submitted[stream]["tenant"]))
    assert len(tenants) == 2, "the key alone says whose turn it is"
    assert all(of_queue == of_request for _, of_queue, of_request in tenants)


def test_a_whole_answer_is_one_json_body(door: Door) -> None:
    asking = Asking(door, "/v1/completions", prompt="x")
    door.engine.send(record(door.wait_for(1), b'{"ok":1}', LAST))
    answer = asking.answer()
    assert (answer.status_code, answer.json(), answer.headers["content-length"]) == (200, {"ok": 1}, "8")


@pytest.mark.parametrize("stream", [True, False])
def test_a_failure_before_the_first_byte_has_its_own_status(door: Door, stream: bool) -> None:
    asking = Asking(door, stream=stream)
    door.engine.send(failure(door.wait_for(1), 429, ERROR, retry_after_seconds=3))
    answer = asking.answer()
    assert (answer.status_code, answer.content, answer.headers["retry-after"]) == (429, ERROR, "3")


def test_a_failure_within_a_stream_is_its_last_event(door: Door) -> None:
    asking = Asking(door, stream=True)
    stream = door.wait_for(1)
    door.engine.send(record(stream, b"data: 1\n\n"), failure(stream, 503, ERROR))
    answer = asking.answer()
    assert (answer.status_code, answer.content) == (200, b"data: 1\n\ndata: " + ERROR + b"\n\n")


def test_a_client_that_leaves_is_told_to_the_engine(door: Door) -> None:
    with door.connect() as client:
        client.sendall(raw_chat())
        stream = door.wait_for(1)
        door.engine.send(record(stream, b"data: 1\n\n"))
        client.recv(64)
    door.wait_for_abort()
    assert door.engine.aborted == [stream]


def test_a_client_that_leaves_before_the_first_byte_is_told_too(door: Door) -> None:
    with door.connect() as client:
        client.sendall(raw_chat())
        stream = door.wait_for(1)
    door.wait_for_abort()
    assert door.engine.aborted == [stream]


def test_a_client_that_never_reads_is_cut_off(door: Door) -> None:
    with door.connect() as client:
        client.sendall(raw_chat())
        stream = door.wait_for(1)
        while not door.engine.aborted:
            door.engine.send(record(stream, b"x" * 100_000))
            door.loop.skip(limits.WRITE_SECONDS + 1)
    assert door.engine.aborted == [stream]


def test_models_are_listed_and_described(door: Door) -> None:
    listed = httpx.get(door.url + "/v1/models", timeout=60).json()
    assert [card["id"] for card in listed["data"]] == ["tiny"]
    card = httpx.get(door.url + "/v1/models/tiny", timeout=60).json()
    assert card == listed["data"][0]
    assert (card["object"], card["max_model_len"]) == ("model", 64)
    unknown = httpx.get(door.url + "/v1/models/some/other", timeout=60)
    assert (unknown.status_code, error_of(unknown)["code"]) == (404, "model_not_found")


def test_health_and_readiness_follow_the_engine(door: Door) -> None:
    expected = {"loading": (503, 503), "ready": (200, 200), "draining": (200, 503), "failed": (503, 503)}
    for phase, statuses in expected.items():
        door.engine.phase = phase
        assert door.probes() == statuses
    door.engine.phase, door.engine.late = "ready", True
    assert door.probes() == (200, 503)
    door.engine.stuck = True
    stuck = httpx.get(door.url + "/health", timeout=60)
    assert stuck.status_code == 503
    assert error_of(stuck)["message"] == "step 9 is overdue; restart the server if it stays so"
    door.engine.stuck, door.engine.late, door.engine.hung = False, False, True
    assert door.probes() == (503, 503)
    door.engine.hung, door.engine.down = False, True
    assert door.probes() == (503, 503)


def test_a_server_that_lost_a_replica_is_well_and_says_so(door: Door) -> None:
    door.engine.replicas = ["ready", "failed", "ready"]
    for path in ("/health", "/ready"):
        answer = httpx.get(door.url + path, timeout=60)
        assert (answer.status_code, answer.json()) == (200, {"status": "ok", "replicas_lost": [1]})
    door.engine.replicas = []
    assert httpx.get(door.url + "/ready", timeout=60).json() == {"status": "ok"}


def test_metrics_are_the_engines(door: Door) -> None:
    assert httpx.get(door.url + "/metrics", timeout=60).content == b"# EOF\n"


def test_a_path_that_is_not_there_is_a_404_in_openais_shape(door: Door) -> None:
    missing = httpx.get(door.url + "/v1/nowhere", timeout=60)
    assert missing.status_code == 404
    assert "'/v1/nowhere'" in error_of(missing)["message"]


def test_a_method_that_is_not_taken_is_a_405(door: Door) -> None:
    for method, path in (("GET", CHAT), ("DELETE", "/v1/models")):
        refused = httpx.request(method, door.url + path, timeout=60)
        assert refused.status_code == 405
        assert method in error_of(refused)["message"]
        assert f"send {refused.headers['allow']}" in error_of(refused)["message"]


def test_probes_may_ask_for_the_head_alone(door: Door) -> None:
    for path in ("/health", "/ready"):
        answer = httpx.head(door.url + path, timeout=60)
        assert (answer.status_code, answer.content) == (200, b"")


def test_a_rejected_body_keeps_the_connection(door: Door) -> None:
    with httpx.Client(base_url=door.url, timeout=60) as client:
        refused = client.post(CHAT, json=BODY | {"temperature": "hot"})
        assert refused.status_code == 400
        assert error_of(refused)["param"] == "temperature"
        assert client.get("/health").status_code == 200
    assert door.engine.submitted == {}


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_a_body_that_a_web_page_could_send_unasked_is_refused(door: Door, content_type: str) -> None:
    refused = httpx.post(door.url + CHAT, content=json.dumps(BODY), headers={"content-type": content_type}, timeout=60)
    assert refused.status_code == 400
    assert "application/json" in error_of(refused)["message"]


def test_a_packed_body_is_refused_by_the_name_of_its_packing(door: Door) -> None:
    refused = httpx.post(door.url + CHAT, json=BODY, headers={"content-encoding": "gzip"}, timeout=60)
    assert refused.status_code == 400
    assert "gzip" in error_of(refused)["message"]


def test_a_body_over_the_limit_is_a_413_whether_announced_or_not(door: Door) -> None:
    head = {"content-type": "application/json"}
    announced = httpx.post(door.url + CHAT, content=b" " * (limits.MAX_BODY_BYTES + 1), headers=head, timeout=60)
    assert announced.status_code == 413
    pieces = (b" " * 65_536 for _ in range(limits.MAX_BODY_BYTES // 65_536 + 2))
    chunked = httpx.post(door.url + CHAT, content=pieces, headers=head, timeout=60)
    assert chunked.status_code == 413


def test_headers_over_the_limit_are_refused_in_one_piece_and_in_many(door: Door) -> None:
    with door.connect() as client:
        client.sendall(b"GET /health HTTP/1.1\r\nx: " + b"a" * (limits.MAX_HEADER_BYTES + 1) + b"\r\n\r\n")
        assert client.recv(32).split()[1] == b"431"
    line = b"x: " + b"a" * 1000 + b"\r\n"
    with door.connect() as client:
        client.sendall(b"GET /health HTTP/1.1\r\n")
        for _ in range(limits.MAX_HEADER_BYTES // len(line) + 2):  # a line counts when the next one begins
            client.sendall(line)
        assert client.recv(32).split()[1] == b"431"


def test_a_request_may_have_so_many_headers_and_no_more(door: Door) -> None:
    for number, status in ((limits.MAX_HEADERS, b"200"), (limits.MAX_HEADERS + 1, b"431")):
        lines = b"".join(b"x-%d: a\r\n" % index for index in range(number))
        with door.connect() as client:
            client.sendall(2 * (b"GET /health HTTP/1.1\r\n" + lines + b"\r\n"))
            assert client.recv(32).split()[1] == status


def test_a_client_that_never_ends_its_headers_is_cut_off(door: Door) -> None:
    with door.connect() as client, pytest.raises(ConnectionError):
        send_headers_without_end(client)


def send_headers_without_end(client: socket.socket) -> None:
    client.sendall(b"GET /health HTTP/1.1\r\n")
    while True:
        client.sendall(b"x: " + b"a" * limits.MAX_HEADER_BYTES + b"\r\n")


def test_a_half_sent_header_is_closed_in_time(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "HEADER_SECONDS", 0.2)
    for start in (b"", b"GET /health HTTP/1.1\r\nhost:"):
        with door.connect() as client:
            client.sendall(start)
            assert b" 408 " in client.recv(4096)


def test_a_half_sent_body_is_closed_in_time(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "BODY_SECONDS", 0.2)
    with door.connect() as client:
        client.sendall(raw_chat()[:-10])
        assert b" 408 " in client.recv(4096)


def test_an_answer_longer_than_the_header_limit_is_not_disturbed(door: Door) -> None:
    with httpx.Client(timeout=60) as client:
        for num in (1, 2):
            asking = Asking(door, client=client, stream=True)
            stream = door.wait_for(num)
            door.loop.skip(limits.HEADER_SECONDS + 1)
            door.engine.send(record(stream, b"data: [DONE]\n\n", LAST))
            assert asking.answer().content == b"data: [DONE]\n\n"


def test_rubbish_on_the_socket_is_a_400_that_writes_no_log(door: Door, caplog: pytest.LogCaptureFixture) -> None:
    with door.connect() as client:
        client.sendall(b"\x16\x03\x01\x02\x00 hello\r\n\r\n")
        assert b" 400 " in client.recv(4096)
    assert httpx.get(door.url + "/health", timeout=60).status_code == 200
    assert "uvicorn.error" not in [line.name for line in caplog.records]


def test_pipelined_requests_are_answered_in_order(door: Door) -> None:
    with door.connect() as client:
        client.sendall(
            b"GET /health HTTP/1.1\r\nhost: x\r\n\r\nGET /nowhere HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
        )
        answer = b""
        while piece := client.recv(4096):
            answer += piece
    assert answer.index(b" 200 ") < answer.index(b" 404 ")


def test_too_many_connections_are_told_so(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_CONNECTIONS", 1)
    with door.connect(), door.connect() as second:
        assert b" 503 " in second.recv(4096)


def test_a_locked_door_asks_for_a_key_before_it_reads(locked_door: Door) -> None:
    refused = httpx.post(locked_door.url + CHAT, content=b"rubbish", timeout=60)
    assert refused.status_code == 401
    assert refused.headers["www-authenticate"] == "Bearer"
    assert error_of(refused)["code"] == "invalid_api_key"
    assert httpx.get(locked_door.url + "/metrics", timeout=60).status_code == 401
    assert httpx.get(locked_door.url + "/health", timeout=60).status_code == 200
    with_key = httpx.get(locked_door.url + "/v1/models", headers={"authorization": "Bearer secret"}, timeout=60)
    assert with_key.status_code == 200


def test_the_openapi_document_has_every_route_and_the_bodies_fields(door: Door) -> None:
    document = httpx.get(door.url + "/openapi.json", timeout=60).json()
    assert {CHAT, "/v1/completions", "/v1/models", "/v1/models/{model}", "/health", "/ready", "/metrics"} <= set(
        document["paths"]
    )
    assert "temperature" in document["components"]["schemas"]["ChatBody"]["properties"]
    assert document["paths"][CHAT]["post"]["requestBody"]["required"]


def test_messages_have_errors_of_their_own_form(door: Door, locked_door: Door) -> None:
    asking = Asking(door, "/v1/messages", max_tokens=1)
    door.engine.send(failure(door.wait_for(1), 429, ERROR, 7))
    answer = asking.answer()
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "7")
    assert answer.json() == {"type": "error", "error": {"type": "rate_limit_error", "message": "no"}}
    locked = httpx.post(f"{locked_door.url}/v1/messages", json={}, timeout=60)
    assert locked.json()["error"]["type"] == "authentication_error"


def test_a_stream_of_messages_that_fails_ends_with_an_error_event(door: Door) -> None:
    asking = Asking(door, "/v1/messages", max_tokens=1, stream=True)
    stream = door.wait_for(1)
    door.engine.send(record(stream, b"event: message_start\ndata: {}\n\n"), failure(stream, 500, ERROR))
    last = asking.answer().text.split("\n\n")[-2]
    assert last == 'event: error\ndata: {"type":"error","error":{"type":"api_error","message":"no"}}'


def test_a_stream_of_a_response_that_is_cut_off_ends_with_an_error_event(door: Door) -> None:
    asking = Asking(door, "/v1/responses", input="x", stream=True)
    stream = door.wait_for(1)
    begun = b'event: response.created\ndata: {"type":"response.created","sequence_number":0}\n\n'
    door.engine.send(record(stream, begun), record(stream, b"", LAST | TOO_SLOW))
    name, data = asking.answer().text.split("\n\n")[-2].split("\ndata: ")
    event = ResponseErrorEvent.model_validate_json(data, strict=True)
    assert (name, event.code, event.param) == ("event: error", "slow_client", None)
    assert "read too slowly" in event.message
    assert event.sequence_number > 0


def test_a_name_of_any_length_is_cut_in_an_error(door: Door) -> None:
    answer = httpx.post(door.url + CHAT, json=BODY | {"chat_template_kwargs": {"k" * 100_000: 1 << 70}}, timeout=60)
    assert answer.status_code == 400
    assert len(answer.content) < 1000


def test_the_load_is_what_is_not_answered(door: Door) -> None:
    asking = Asking(door)
    stream = door.wait_for(1)
    assert httpx.get(f"{door.url}/load", timeout=60).json() == {"server_load": 1}
    door.engine.send(record(stream, b"{}", LAST))
    asking.answer()
    assert httpx.get(f"{door.url}/load", timeout=60).json() == {"server_load": 0}


@pytest.mark.parametrize("door_name", ["door", "locked_door"])
def test_the_chat_page_is_one_file_and_needs_no_key(door_name: str, request: pytest.FixtureRequest) -> None:
    door: Door = request.getfixturevalue(door_name)
    page = httpx.get(door.url)
    assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert "v1/chat/completions" in page.text
    assert "://" not in page.text, "no outside resource"
    assert "default-src 'none'; script-src 'sha256-" in page.headers["content-security-policy"]
    assert httpx.post(door.url).status_code == 405


def test_without_ui_there_is_no_page() -> None:
    for door in open_door(None, http=HttpSettings(ui=False)):
        assert httpx.get(door.url).status_code == 404
