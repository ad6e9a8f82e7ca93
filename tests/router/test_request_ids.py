"""Every answer has a request id, and the log's line of a request has the same one."""

from __future__ import annotations

import re
import socket
import struct
import threading
import time
from collections.abc import Iterator

import httpx
import pytest
from plait.http.auth import ApiKeys
from plait.http.key_terms import KeyTerms
from plait.http.request_ids import MAX_REQUEST_ID_BYTES
from plait_testing.front_door import BODY, CHAT, Asking, Door, open_door
from plait_testing.in_memory_engine import LAST, record

ID = "x-request-id"
MADE = re.compile(r"[0-9a-f]{32}")


@pytest.fixture
def door() -> Iterator[Door]:
    yield from open_door(ApiKeys({"secret": KeyTerms()}), logs_requests=True)


@pytest.fixture
def silent_door() -> Iterator[Door]:
    yield from open_door(None)


def client(request_id: str | None = None) -> httpx.Client:
    named = {} if request_id is None else {ID: request_id}
    return httpx.Client(headers={"authorization": "Bearer secret"} | named, timeout=60)


def wait_for_lines(capfd: pytest.CaptureFixture[str], num: int) -> list[str]:
    """A line is written after its answer: the client may be faster."""
    text, deadline = "", time.monotonic() + 60
    while text.count("\n") < num:
        assert time.monotonic() < deadline, text
        text += capfd.readouterr().err
        time.sleep(0.01)
    return text.splitlines()


@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_repeats_the_clients_id(door: Door, stream: bool) -> None:
    asking = Asking(door, client=client("trace-7:a/b"), stream=stream)
    door.engine.send(record(door.wait_for(1), b"data: [DONE]\n\n", LAST))
    assert asking.answer().headers.get_list(ID) == ["trace-7:a/b"]


@pytest.mark.parametrize("given", [None, "", "a b", "a\tb", 'a"b', "x" * (MAX_REQUEST_ID_BYTES + 1), "caf\u00e9"])
def test_an_id_that_is_missing_or_unsafe_is_replaced(door: Door, given: str | None) -> None:
    headers = {} if given is None else {ID.encode(): given.encode("latin-1")}
    (told,) = httpx.get(door.url + "/health", headers=headers).headers.get_list(ID)
    assert MADE.fullmatch(told)


def test_the_longest_id_is_taken(door: Door) -> None:
    longest = "x" * MAX_REQUEST_ID_BYTES
    assert httpx.get(door.url + "/health", headers={ID: longest}).headers[ID] == longest


def test_two_requests_have_two_ids(door: Door) -> None:
    assert len({httpx.get(door.url + "/health").headers[ID] for _ in range(2)}) == 2


@pytest.mark.parametrize(
    ("method", "path", "key", "status"),
    [("GET", "/v1/models", "wrong", 401), ("GET", "/nothing", "secret", 404), ("POST", CHAT, "secret", 400)],
)
def test_errors_have_the_id(door: Door, method: str, path: str, key: str, status: int) -> None:
    headers = {ID: "mine", "authorization": f"Bearer {key}"}
    answer = httpx.request(method, door.url + path, headers=headers)
    assert (answer.status_code, answer.headers[ID]) == (status, "mine")


def test_what_is_no_http_gets_an_id_too(door: Door) -> None:
    with socket.create_connection(("127.0.0.1", door.port)) as connection:
        connection.sendall(b"rubbish\r\n\r\n")
        head = connection.makefile("rb").read().partition(b"\r\n\r\n")[0]
    assert re.search(rb"(?m)^x-request-id: [0-9a-f]{32}\r?$", head)


def test_a_line_break_in_an_id_forges_no_header_and_no_line(door: Door, capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_connection(("127.0.0.1", door.port)) as connection:
        connection.sendall(
            b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\nx-request-id: a\r\n forged: 1\r\n\r\n"
        )
        answer = connection.makefile("rb").read()
    assert b"forged" not in answer
    assert "forged" not in capfd.readouterr().err


def test_the_log_has_one_line_a_request_without_prompt_and_key(door: Door, capfd: pytest.CaptureFixture[str]) -> None:
    asking = Asking(door, path=CHAT + "?token=hidden", client=client("mine"))
    used = struct.pack("<QQB", 70, 5, 1)
    door.engine.send(record(door.wait_for(1), b'{"ok":1}', LAST), record(door.wait_for(1), used, 16))
    asking.answer()
    httpx.get(door.url + "/no%0Athing", headers={ID: "other"})
    first, second = wait_for_lines(capfd, 2)
    assert re.search(
        r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} INFO http: request_id=mine method=POST "
        r'path="/v1/chat/completions" status=200 end=whole head_seconds=\d+\.\d{3} seconds=\d+\.\d{3} '
        r"prompt_tokens=70 output_tokens=5 reason=length key=2bb80d53$",
        first,
    ), first
    assert 'request_id=other method=GET path="/no\\nthing" status=401' in second
    assert second.endswith("prompt_tokens=- output_tokens=- reason=- key=-")


def test_an_answer_that_the_client_left_is_cut_off(door: Door, capfd: pytest.CaptureFixture[str]) -> None:
    body = BODY | {"stream": True}
    send_first_chunk = threading.Thread(target=lambda: door.engine.send(record(door.wait_for(1), b"data: 1\n\n")))
    send_first_chunk.start()
    with client("gone") as leaving, leaving.stream("POST", door.url + CHAT, json=body) as answer:
        assert answer.status_code == 200
    send_first_chunk.join()
    assert "request_id=gone method=POST" in (line := wait_for_lines(capfd, 1)[0])
    assert "end=cut_off" in line


def test_nothing_is_logged_by_default(silent_door: Door, capfd: pytest.CaptureFixture[str]) -> None:
    assert httpx.get(silent_door.url + "/health").status_code == 200
    assert "request_id" not in capfd.readouterr().err
