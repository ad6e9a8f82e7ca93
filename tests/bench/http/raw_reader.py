"""A reader that is not the limit: chats over bare sockets, event streams counted, some kept to be parsed afterwards.

A read costs it one system call, a count of the events' ends and a look at the last bytes.
"""

from __future__ import annotations

import gc
import re
import resource
import select
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeAlias
from urllib.parse import urlsplit

READ_BYTES = 1 << 18
WAIT_SECONDS = 120.0
EVENT_END, STREAM_END = b"\n\n", b"\r\n0\r\n\r\n"
BEGUN_EVENTS = 3
"""The role's and two with tokens: the front door has handed its socket over, if it does."""
LENGTH = re.compile(rb"\r\ncontent-length: (\d+)\r\n", re.IGNORECASE)
GOOD = b"HTTP/1.1 200"

Call: TypeAlias = Callable[[], None]
Read: TypeAlias = tuple[float, bytes]
"""What a read brought, and when."""


class ReaderError(Exception):
    """A server did not answer as it should."""


@dataclass
class Line:
    """A connection and what came of its answer."""

    socket: socket.socket
    num_events: int = 0
    is_complete: bool = False
    kept: list[Read] | None = None
    """All of it, if it is parsed later."""
    tail: bytes = b""
    """The last bytes of a stream, whose events' ends may be cut; all of a whole answer so far."""

    def read(self, into: memoryview) -> bytes:
        """What has come; nothing if it was part of a TLS record."""
        try:
            num = self.socket.recv_into(into)
        except (ssl.SSLWantReadError, BlockingIOError):
            return b""
        if num == 0:
            raise ReaderError(f"the server closed a connection after {self.num_events} events: {self.tail!r}")
        return bytes(into[:num])

    def count(self, data: bytes) -> int:
        """How many events end in `data`, the stream's next bytes."""
        if not self.tail and not data.startswith(GOOD):
            raise ReaderError(f"a request failed: {data!r}")
        num = data.count(EVENT_END) + (data.startswith(b"\n") and self.tail.endswith(b"\n"))
        self.tail = (data if len(data) >= len(STREAM_END) else self.tail + data)[-len(STREAM_END) :]
        self.num_events += num
        self.is_complete = self.tail == STREAM_END
        return num

    def take_answer(self, data: bytes) -> bool:
        """Take bytes of a whole answer; whether it is complete."""
        self.tail += data
        head, end, body = self.tail.partition(b"\r\n\r\n")
        if not end:
            return False
        length = LENGTH.search(head + b"\r\n")
        if not head.startswith(GOOD) or length is None:
            raise ReaderError(f"a request failed: {self.tail!r}")
        if len(body) < int(length[1]):
            return False
        self.tail = b""
        return True


@dataclass
class Window:
    """A time under full load, and what came in it."""

    begun: float = 0.0
    ended: float = 0.0
    num_events: int = 0
    """Or whole answers."""
    num_reads: int = 0
    cpu_seconds: float = 0.0
    """Of the reader."""

    @property
    def seconds(self) -> float:
        return self.ended - self.begun

    def begin(self) -> None:
        self.begun, self.cpu_seconds = time.monotonic(), -time.process_time()

    def end(self) -> None:
        self.ended, self.cpu_seconds = time.monotonic(), self.cpu_seconds + time.process_time()


@dataclass
class Streaming:
    """Streams under way. Its window is from when the last has begun until the first is complete."""

    num_unbegun: int
    on_begin: Call
    on_end: Call
    window: Window = field(default_factory=Window)

    def take(self, line: Line, data: bytes) -> None:
        """Count a read of one stream."""
        num_before = line.num_events
        num = line.count(data)
        if self.num_unbegun:
            self._note_begin(num_before, line.num_events)
        elif not self.window.ended:
            self.window.num_events += num
            self.window.num_reads += 1
            if line.is_complete:
                self.window.end()
                self.on_end()

    def _note_begin(self, num_before: int, num: int) -> None:
        self.num_unbegun -= num_before < BEGUN_EVENTS <= num
        if not self.num_unbegun:
            self.on_begin()
            self.window.begin()


class RawReader:
    """Connections to one server, each of which asks for chats."""

    def __init__(self, url: str, num: int, tls: ssl.SSLContext | None = None) -> None:
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        parts = urlsplit(url)
        self._address, self._tls = (parts.hostname or "", parts.port or 80), tls
        self._into = memoryview(bytearray(READ_BYTES))
        self._epoll = select.epoll()
        self.lines = [Line(self._connect()) for _ in range(num)]
        self._by_number = {line.socket.fileno(): line for line in self.lines}
        for number in self._by_number:
            self._epoll.register(number, select.EPOLLIN)

    def close(self) -> None:
        self._epoll.close()
        for line in self.lines:
            line.socket.close()

    def stream(self, bodies: Sequence[bytes], on_begin: Call, on_end: Call) -> Window:
        """One event stream a connection, to its end; the calls come when the window begins and ends."""
        streaming = Streaming(len(self.lines), on_begin, on_end)
        num_open, monotonic, into = len(self.lines), time.monotonic, self._into
        with _no_collections():
            self._send_all(bodies)
            while num_open:
                for line in self._ready():
                    if data := line.read(into):
                        if line.kept is not None:
                            line.kept.append((monotonic(), data))
                        streaming.take(line, data)
                        num_open -= line.is_complete
        if not (streaming.window.ended and streaming.window.num_events):
            raise ReaderError("the first stream ended before all had begun; ask for longer answers")
        return streaming.window

    def answer(self, bodies: Sequence[bytes], warm_up: float, seconds: float, on_begin: Call) -> Window:
        """A closed loop of whole answers: each connection asks again once it is answered.

        `on_begin` is called after the warm-up, when the window begins.
        """
        window, started = Window(), time.monotonic()
        self._send_all(bodies)
        while not window.begun or time.monotonic() - window.begun < seconds:
            for line in self._ready():
                if line.take_answer(line.read(self._into)):
                    window.num_events += 1
                    line.socket.sendall(_request(bodies[window.num_events % len(bodies)]))
            if not window.begun and time.monotonic() - started > warm_up:
                on_begin()
                window.begin()
                window.num_events = 0
        window.end()
        return window

    def _ready(self) -> list[Line]:
        found = self._epoll.poll(WAIT_SECONDS, len(self.lines))
        if not found:
            raise ReaderError(f"nothing came for {WAIT_SECONDS:g} s")
        return [self._by_number[number] for number, _ in found]

    def _send_all(self, bodies: Sequence[bytes]) -> None:
        for line, body in zip(self.lines, bodies, strict=True):
            line.socket.sendall(_request(body))

    def _connect(self) -> socket.socket:
        connection = socket.create_connection(self._address, timeout=WAIT_SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._tls is not None:
            connection = self._tls.wrap_socket(connection, server_hostname=self._address[0])
        connection.setblocking(False)
        return connection


def _request(body: bytes) -> bytes:
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
    return head + b"content-length: %d\r\n\r\n" % len(body) + body


@contextmanager
def _no_collections() -> Iterator[None]:
    """One would hold up every stream. So the one before them comes before they are asked for."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
