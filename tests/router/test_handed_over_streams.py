"""Event streams whose middle the engine writes to the client's socket itself."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import suppress

import httpx
import pytest
from plait.http.connection_limits import HEADER_SECONDS, WRITE_SECONDS
from plait.http.streams import COMMENT, MAX_BACKLOG_BYTES
from plait.proxy_settings import COMMENT_SECONDS
from plait_testing.front_door import CHAT, Asking, Door, open_door, raw_chat
from plait_testing.in_memory_engine import GONE, LAST, failure, record


class InMemorySockets:
    """What the front door tells the engine about its sockets; a test writes to them."""

    def __init__(self) -> None:
        self.announced: dict[int, int] = {}
        self.sockets: dict[int, int] = {}
        self.released: list[int] = []
        self.comments: list[bytes] = []
        self.has_descriptors = True
        self._changed = threading.Condition()

    def announce(self, stream: int, max_unsent_bytes: int) -> None:
        self.announced[stream] = max_unsent_bytes

    def hand_over(self, stream: int, socket: int, write_seconds: float) -> None:
        if not self.has_descriptors:
            raise OSError("Too many open files (os error 24)")  # as the binding words it
        assert write_seconds == WRITE_SECONDS
        with self._changed:
            self.sockets[stream] = os.dup(socket)
            self._changed.notify_all()

    def release(self, stream: int) -> None:
        with self._changed:
            self.forget(stream)
            self.released.append(stream)
            self._changed.notify_all()

    def forget(self, stream: int) -> None:
        if (socket := self.sockets.pop(stream, None)) is not None:
            os.close(socket)

    def comment(self, comment: bytes) -> None:
        self.comments.append(comment)

    def write(self, stream: int, payload: bytes) -> None:
        """Write one chunk to a stream, once it was handed over."""
        with self._changed:
            assert self._changed.wait_for(lambda: stream in self.sockets, timeout=60)
        os.write(self.sockets[stream], b"%x\r\n%s\r\n" % (len(payload), payload))

    def wait_for_release(self) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: bool(self.released), timeout=60)

    def close(self) -> None:
        for stream in list(self.sockets):
            self.forget(stream)


@pytest.fixture
def sockets() -> Iterator[InMemorySockets]:
    made = InMemorySockets()
    yield made
    made.close()


@pytest.fixture
def door(sockets: InMemorySockets) -> Iterator[Door]:
    yield from open_door(None, sockets)


def begin_handed_over(door: Door, sockets: InMemorySockets) -> int:
    """The first request's stream, after a part by the front door and one by the engine."""
    stream = door.wait_for(1)
    door.engine.send(record(stream, b"data: 1\n\n"))
    sockets.write(stream, b"data: 2\n\n")
    return stream


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {}),
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/responses", {"input": "x"}),
        ("/v1/messages", {"max_tokens": 1}),
    ],
)
def test_the_engine_writes_between_the_first_part_and_the_last(
    door: Door, sockets: InMemorySockets, path: str, fields: dict[str, object]
) -> None:
    client = httpx.Client(timeout=60)
    for number in (1, 2):  # on one connection
        asking = Asking(door, path, client=client, stream=True, **fields)
        stream = door.wait_for(number)
        door.engine.send(record(stream, b"data: 1\n\n"))
        sockets.write(stream, b"data: 2\n\n")
        sockets.write(stream, b"data: 3\n\n")
        door.engine.send(record(stream, b"data: [DONE]\n\n", LAST))
        assert asking.answer().text == "data: 1\n\ndata: 2\n\ndata: 3\n\ndata: [DONE]\n\n"
        assert sockets.announced[stream] == MAX_BACKLOG_BYTES
    assert not door.engine.aborted


def test_a_failure_behind_it_is_the_last_event(door: Door, sockets: InMemorySockets) -> None:
    asking = Asking(door, stream=True)
    stream = begin_handed_over(door, sockets)
    door.engine.send(failure(stream, 503, b'{"error":{}}'))
    assert asking.answer().text == 'data: 1\n\ndata: 2\n\ndata: {"error":{}}\n\n'


def test_a_stream_of_one_part_is_never_handed_over(door: Door, sockets: InMemorySockets) -> None:
    asking = Asking(door, stream=True)
    stream = door.wait_for(1)
    door.engine.send(record(stream, b"data: [DONE]\n\n", LAST))
    assert asking.answer().text == "data: [DONE]\n\n"
    assert not sockets.sockets


def test_a_whole_answer_is_not_announced(door: Door, sockets: InMemorySockets) -> None:
    asking = Asking(door)
    door.engine.send(record(door.wait_for(1), b"{}", LAST))
    assert asking.answer().json() == {}
    assert not sockets.announced


def test_a_client_that_leaves_releases_its_socket(door: Door, sockets: InMemorySockets) -> None:
    with door.connect() as client:
        client.sendall(raw_chat())
        stream = begin_handed_over(door, sockets)
        client.recv(64)
    sockets.wait_for_release()
    assert door.engine.aborted == sockets.released == [stream]


def test_a_server_without_descriptors_ends_the_stream_by_name(door: Door, sockets: InMemorySockets) -> None:
    sockets.has_descriptors = False
    asking = Asking(door, stream=True)
    stream = door.wait_for(1)
    door.engine.send(record(stream, b"data: 1\n\n"))
    first, last, _ = asking.answer().text.split("\n\n")
    assert first == "data: 1"
    assert (
        "could not open a file descriptor for this stream (Too many open files (os error 24)); try again later" in last
    )
    sockets.wait_for_release()
    assert door.engine.aborted == sockets.released == [stream]


def test_a_client_that_the_engine_lost_ends_the_request(door: Door, sockets: InMemorySockets) -> None:
    with door.connect() as client:
        client.sendall(raw_chat())
        stream = begin_handed_over(door, sockets)
        sockets.forget(stream)
        door.engine.send(record(stream, b"", LAST | GONE))
        with suppress(ConnectionResetError):
            while client.recv(65_536):
                pass


def test_a_client_that_sends_two_requests_and_leaves_ends_both(door: Door, sockets: InMemorySockets) -> None:
    with door.connect() as client:
        client.sendall(raw_chat() + raw_chat()[:-1])
        stream = begin_handed_over(door, sockets)
        client.recv(64)
    sockets.wait_for_release()
    assert door.engine.aborted == sockets.released == [stream]


def test_nothing_is_written_between_the_engines_bytes(door: Door, sockets: InMemorySockets) -> None:
    with door.connect() as client:
        client.sendall(raw_chat() + b"POST /v1")
        begin_handed_over(door, sockets)
        door.loop.skip(HEADER_SECONDS + 1)  # the second request's headers are late
        read = b""
        with suppress(ConnectionResetError):
            while piece := client.recv(65_536):
                read += piece
    assert b" 408 " not in read
    sockets.wait_for_release()


def test_a_line_on_which_nothing_comes_is_held_with_comments(door: Door, sockets: InMemorySockets) -> None:
    """By the head of the answer and a comment before its first part, and by the writer thread after it."""
    asking = Asking(door, stream=True)
    stream = door.wait_for(1)
    door.loop.skip(COMMENT_SECONDS)
    door.engine.send(record(stream, b"data: 1\n\n"))
    sockets.write(stream, b"data: 2\n\n")
    door.loop.skip(COMMENT_SECONDS)
    assert COMMENT in sockets.comments
    sockets.forget(stream)
    door.engine.send(record(stream, b"data: [DONE]\n\n", LAST))
    text = asking.answer().text
    before, _, rest = text.partition("data: 1")
    assert before == COMMENT.decode()
    assert rest == "\n\ndata: 2\n\ndata: [DONE]\n\n"


def test_a_failure_after_a_comment_is_an_event_of_the_stream(door: Door) -> None:
    asking = Asking(door, stream=True)
    stream = door.wait_for(1)
    door.loop.skip(COMMENT_SECONDS)
    door.engine.send(failure(stream, 504, b'{"error": {"message": "late"}}'))
    answer = asking.answer()
    assert answer.status_code == 200
    assert answer.text == COMMENT.decode() + 'data: {"error": {"message": "late"}}\n\n'


def test_a_whole_answer_has_no_comments(door: Door) -> None:
    asking = Asking(door)
    stream = door.wait_for(1)
    door.loop.skip(COMMENT_SECONDS)
    door.engine.send(record(stream, b"{}", LAST))
    assert asking.answer().content == b"{}"
