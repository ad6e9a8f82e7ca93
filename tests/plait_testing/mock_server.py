"""An OpenAI-compatible server that computes nothing and keeps time exactly.

    python tests/plait_testing/mock_server.py --ttft 0.05 --itl 0.01

One thread sends every chunk at its moment, absolute since the request came, so that delays do not add up. It writes
down when it really sent each (CLOCK_MONOTONIC, which its clients share): `GET /truth` brings that, and forgets it.
`GET /gather/N` lets the next answers wait until N requests are there.
"""

from __future__ import annotations

import heapq
import itertools
import select
import socket
import sys
from collections import deque
from functools import lru_cache
from pathlib import Path
from time import monotonic
from typing import Any

import msgspec

sys.path.insert(0, str(Path(__file__).parents[1]))

from plait_testing.mock_timing import Moment, Timing, moments, read_flags

MODEL = "mock"
SSE = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
RETRY = {"http-500": (500, "the mock broke"), "http-429": (429, "the mock's queue is full")}


class Body(msgspec.Struct):
    model: str = MODEL
    prompt: str | list[int] | None = None
    messages: list[dict[str, str]] | None = None
    max_tokens: int = 16
    stream: bool = False

    @property
    def num_prompt_tokens(self) -> int:
        """Ids count as they are, words one each, and a chat's template seven."""
        if self.messages is not None:
            return 7 + sum(len(message["content"].split()) for message in self.messages)
        return len(self.prompt.split() if isinstance(self.prompt, str) else self.prompt or ())


class Told(msgspec.Struct):
    """What the mock knows of one answer, in seconds of CLOCK_MONOTONIC."""

    came: float
    sent: list[float] = []
    tokens: list[int] = []
    ended: float = 0.0
    num_prompt_tokens: int = 0
    max_tokens: int = 0
    fails: bool = False


class Client:
    """One connection."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.received = bytearray()

    def send(self, data: bytes) -> None:
        """Write all of `data`; ignore a client that has gone."""
        try:
            while data:
                data = data[self.socket.send(data) :]
        except BlockingIOError:
            self.socket.setblocking(True)
            self.socket.sendall(data)
            self.socket.setblocking(False)
        except OSError:
            pass


class Stream:
    """One answer: its chunks in the order in which they are due."""

    def __init__(self, client: Client, body: Body, timing: Timing, number: int, came: float) -> None:
        self.client, self.body, self.timing = client, body, timing
        self.number = number
        self.told = Told(came, num_prompt_tokens=body.num_prompt_tokens, max_tokens=body.max_tokens)
        self.told.fails = bool(timing.fail_every and number % timing.fail_every == 0)
        self.begun = came
        self.num_tokens = 0
        self._rest = b""
        self._timeline = moments(timing, body.max_tokens, number)
        self._next: Moment | None = next(self._timeline)

    def next_due(self) -> float:
        """When something is to be sent next."""
        assert self._next is not None
        return self.begun + self._next.offset + (self.timing.cut if self._rest else 0.0)

    def step(self) -> bool:
        """Send what is due; true when the answer is over."""
        assert self._next is not None
        data = self._rest or self._chunk(self._next.num_tokens)
        if self.timing.cut and not self._rest:
            middle = data.index(b"data:") + 3
            self.client.send(data[:middle])
            self._rest = data[middle:]
            return False
        self._rest = b""
        self.told.sent.append(monotonic())
        self.client.send(data)
        self.told.tokens.append(self._next.num_tokens)
        self._next = next(self._timeline, None)
        return self._next is None or (self.told.fails and len(self.told.sent) == 2)

    def _chunk(self, num_tokens: int) -> bytes:
        self.num_tokens += num_tokens
        if not self.body.stream:
            return b""
        usage = self._usage() if self.timing.tells == "running-usage" else b""
        return chunk(num_tokens, self.body.messages is not None, self.timing.tells == "token-ids", usage)

    def _usage(self) -> bytes:
        return b'{"prompt_tokens":%d,"completion_tokens":%d}' % (self.told.num_prompt_tokens, self.num_tokens)

    def end(self) -> None:
        """Send the end of the answer."""
        self.told.ended = monotonic()
        if self.told.fails:
            self._fail()
        elif self.body.stream:
            choice = b'{"index":0,"text":"","delta":{},"finish_reason":"length"}'
            usage = framed(b'data: {"choices":[],"usage":%b}\n\n' % self._usage())
            last = framed(b'data: {"choices":[%b]}\n\n' % choice)
            told = usage if self.timing.tells != "nothing" else b""
            self.client.send(last + told + framed(b"data: [DONE]\n\n") + b"0\r\n\r\n")
        else:
            usage = b',"usage":%b' % self._usage() if self.timing.tells != "nothing" else b""
            words = b" word" * self.num_tokens
            choice = b'{"text":"%b","message":{"content":"%b"},"finish_reason":"length"}' % (words, words)
            self.client.send(answer(200, b'{"choices":[%b]%b}' % (choice, usage)))

    def _fail(self) -> None:
        if self.timing.failure == "error-event":
            self.client.send(
                framed(b'event: error\ndata: {"error":{"message":"the mock lost its worker"}}\n\n') + b"0\r\n\r\n"
            )
        elif self.timing.failure == "close":
            self.client.socket.shutdown(socket.SHUT_RDWR)


@lru_cache(maxsize=64)
def chunk(num_tokens: int, is_chat: bool, has_ids: bool, usage: bytes) -> bytes:
    """An event with some tokens."""
    ids = b',"token_ids":%b' % str(list(range(num_tokens))).encode() if has_ids else b""
    text = b" word" * num_tokens
    choice = b'{"index":0,"delta":{"content":"%b"}%b}' if is_chat else b'{"index":0,"text":"%b"%b}'
    told = b',"usage":%b' % usage if usage else b""
    return framed(b'data: {"id":"mock","object":"chunk","choices":[%b]%b}\n\n' % (choice % (text, ids), told))


def framed(event: bytes) -> bytes:
    """A chunk of HTTP's."""
    return b"%x\r\n%b\r\n" % (len(event), event)


def answer(status: int, body: bytes) -> bytes:
    """A whole answer."""
    head = b"HTTP/1.1 %d Mock\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % (status, len(body))
    return head + body


class MockServer:
    """All connections and answers."""

    def __init__(self, timing: Timing, port: int = 0) -> None:
        self._timing = timing
        self._listener = socket.create_server(("127.0.0.1", port), backlog=1024)
        self._listener.setblocking(False)
        self._epoll = select.epoll()
        self._epoll.register(self._listener.fileno(), select.EPOLLIN)
        self._clients: dict[int, Client] = {}
        self._due: list[tuple[float, int, Stream]] = []
        self._waiting: deque[Stream] = deque()
        self._gathered: list[Stream] = []
        self._num_to_gather = 0
        self._num_running = 0
        self._numbers = itertools.count(1)
        self._ties = itertools.count()
        self._told: list[Told] = []
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def serve(self) -> None:
        """Until killed."""
        while True:
            wait = max(0.0, self._due[0][0] - monotonic()) if self._due else None
            # epoll rounds its own waiting up to milliseconds; select on it does not.
            select.select([self._epoll.fileno()], [], [], wait)
            for fd, _ in self._epoll.poll(0):
                self._accept() if fd == self._listener.fileno() else self._read(self._clients[fd])
            self._send_due()

    def _send_due(self) -> None:
        now = monotonic()
        while self._due and self._due[0][0] <= now:
            stream = heapq.heappop(self._due)[2]
            if stream.step():
                self._end(stream)
            else:
                self._schedule(stream)

    def _schedule(self, stream: Stream) -> None:
        heapq.heappush(self._due, (stream.next_due(), next(self._ties), stream))

    def _end(self, stream: Stream) -> None:
        if not (stream.told.fails and self._timing.failure == "hang"):
            stream.end()
        self._num_running -= 1
        if self._waiting:
            self._run(self._waiting.popleft(), stream.told.ended)

    def _accept(self) -> None:
        """Every connection that waits, since the next look may be late."""
        while True:
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                return
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._clients[connection.fileno()] = Client(connection)
            self._epoll.register(connection.fileno(), select.EPOLLIN)

    def _read(self, client: Client) -> None:
        try:
            data = client.socket.recv(1 << 20)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._epoll.unregister(client.socket.fileno())
            del self._clients[client.socket.fileno()]
            client.socket.close()
            return
        client.received += data
        head, blank, rest = bytes(client.received).partition(b"\r\n\r\n")
        length = content_length(head)
        if blank and len(rest) >= length:
            client.received = bytearray(rest[length:])
            self._take(client, head, rest[:length])

    def _take(self, client: Client, head: bytes, body: bytes) -> None:
        path = head.split(b" ")[1]
        if path == b"/v1/models":
            client.send(answer(200, b'{"object":"list","data":[{"id":"%b"}]}' % MODEL.encode()))
        elif path == b"/truth":
            client.send(answer(200, msgspec.json.encode(self._told)))
            self._told.clear()
        elif path.startswith(b"/gather/"):
            self._num_to_gather = int(path.removeprefix(b"/gather/"))
            client.send(answer(200, b"{}"))
        elif path in (b"/v1/completions", b"/v1/chat/completions"):
            self._answer(client, msgspec.json.decode(body, type=Body), body)
        else:
            client.send(answer(404, b'{"error":{"message":"the mock has no such path"}}'))

    def _answer(self, client: Client, body: Body, raw: bytes) -> None:
        if refusal := self._refusal(raw):
            client.send(answer(400, msgspec.json.encode({"error": {"message": refusal}})))
            return
        stream = Stream(client, body, self._timing, next(self._numbers), monotonic())
        self._told.append(stream.told)
        if stream.told.fails and self._timing.failure in RETRY:
            status, message = RETRY[self._timing.failure]
            client.send(answer(status, msgspec.json.encode({"error": {"message": message}})))
        elif self._num_to_gather:
            self._gather(stream)
        else:
            self._admit(stream, stream.told.came)

    def _gather(self, stream: Stream) -> None:
        self._gathered.append(stream)
        if len(self._gathered) < self._num_to_gather:
            return
        gathered, self._gathered, self._num_to_gather = self._gathered, [], 0
        now = monotonic()
        for each in gathered:
            self._admit(each, now)

    def _admit(self, stream: Stream, begun: float) -> None:
        if self._timing.slots and self._num_running >= self._timing.slots:
            self._waiting.append(stream)
        else:
            self._run(stream, begun)

    def _refusal(self, raw: bytes) -> str | None:
        """Servers that cannot report something reject the request for it, or ignore it, as `nothing` does."""
        asked: dict[str, Any] = msgspec.json.decode(raw)
        running = (asked.get("stream_options") or {}).get("continuous_usage_stats")
        if running and self._timing.tells in ("token-ids", "usage"):
            return "`continuous_usage_stats` is not available here"
        return None

    def _run(self, stream: Stream, begun: float) -> None:
        self._num_running += 1
        stream.begun = begun
        if stream.body.stream:
            stream.client.send(SSE)
        self._schedule(stream)


def content_length(head: bytes) -> int:
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            return int(value)
    return 0


def main() -> None:
    server = MockServer(read_flags(sys.argv[1:]))
    print(server.url, flush=True)
    server.serve()


if __name__ == "__main__":
    main()
