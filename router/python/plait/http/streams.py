"""From the engine's records to the streams that clients read.

The engine makes `event_fd` readable when it has something; one `take` then brings everything for all streams, as
records of u64 stream, u8 flags, u32 length and payload.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Iterator

import msgspec

from plait.http.connection_limits import WRITE_SECONDS
from plait.http.engine import EngineHandle, SocketWriter
from plait.http.errors import error_body
from plait.proxy_settings import COMMENT_SECONDS

MAX_BACKLOG_BYTES = 1 << 20
"""Bytes that a stream holds for a slow client; past them the stream is cut off."""

COMMENT = b": waiting\n\n"

_RECORD = struct.Struct("<QBI")
_FAILURE = struct.Struct("<HH")
_LAST = 1
_ERROR = 2
_TOO_SLOW = 4
_GONE = 8
_USED = 16
_FACTS = struct.Struct("<QQB")
_TIME = struct.Struct("<BQ")
_MOMENTS = ("first_row", "first_token", "preempted", "end")
_REASONS = ("stop", "length", "abort", "error")
MAX_UNSETTLED = 4096
"""Streams that were left before their end, and whose tokens may still be told."""


class Data(msgspec.Struct, frozen=True):
    """Bytes to write; `last` when none follow."""

    payload: bytes
    last: bool


class Failure(msgspec.Struct, frozen=True):
    """The request ended with an error."""

    status: int
    retry_after_seconds: int
    """0: no advice."""
    body: bytes
    """OpenAI's error body, one line of JSON."""


class Gone(msgspec.Struct, frozen=True):
    """The client has left."""


class Used(msgspec.Struct, frozen=True):
    """What a stream took that has ended."""

    num_prompt_tokens: int
    num_output_tokens: int
    """Of all choices."""
    reason: str
    """Why the last choice ended: `stop`, `length`, `abort` or `error`."""
    times: tuple[tuple[str, int], ...] = ()
    """`first_row`, `first_token`, `preempted` (the first ones) and `end`, in microseconds since the engine got it."""


class Caller(msgspec.Struct, frozen=True, kw_only=True):
    """Whose stream it is, for operators."""

    id: str
    """The request's X-Request-Id."""
    path: str
    key: str
    began: float
    """On the monotonic clock."""


OnUsed = Callable[[Used], None]
"""Takes what a stream used that has ended."""


class Record(msgspec.Struct, frozen=True):
    """One of the engine's records."""

    stream: int
    part: Data | Failure | Gone | Used


SLOW_CLIENT = Failure(
    503,
    0,
    error_body(503, "the answer was cut off: it was read too slowly; read faster, or ask for less", code="slow_client"),
)


def parse_records(packed: bytes) -> Iterator[Record]:
    """The records in what `take` gave."""
    offset = 0
    while offset < len(packed):
        stream, flags, length = _RECORD.unpack_from(packed, offset)
        offset += _RECORD.size
        yield Record(stream, _parse_record(flags, packed[offset : offset + length]))
        offset += length


def _parse_record(flags: int, payload: bytes) -> Data | Failure | Gone | Used:
    if flags & _USED:
        num_prompt, num_output, reason = _FACTS.unpack_from(payload)
        times = _TIME.iter_unpack(payload[_FACTS.size :])
        named = tuple((_MOMENTS[moment], micros) for moment, micros in times)
        return Used(num_prompt, num_output, _REASONS[reason], named)
    if flags & _GONE:
        return Gone()
    if flags & _TOO_SLOW:
        return SLOW_CLIENT
    if flags & _ERROR:
        status, retry_after_seconds = _FAILURE.unpack_from(payload)
        return Failure(status, retry_after_seconds, payload[_FAILURE.size :])
    return Data(payload, bool(flags & _LAST))


class Stream:
    """One request's answer: the engine's records fill it, one task reads it."""

    __slots__ = (
        "_backlog_bytes",
        "_chunks",
        "_end",
        "_last",
        "_streams",
        "_waiter",
        "id",
        "is_announced",
        "takes_comments",
    )

    def __init__(self, number: int, streams: Streams, *, is_announced: bool) -> None:
        self.id = number
        self._streams = streams
        self.is_announced = is_announced
        """Its socket may be handed over."""
        self._chunks: list[bytes] = []
        self._backlog_bytes = 0
        self._last = False
        self._end: Failure | Gone | None = None
        self._waiter: asyncio.Future[None] | None = None
        self.takes_comments = False
        """It is an event stream that has begun, and stays with Python."""

    async def next(self) -> Data | Failure | Gone:
        """All bytes since the last call; waits if there are none. Bytes come before the end."""
        while not self._chunks and self._end is None:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if isinstance(self._end, Gone) or not self._chunks:
            return self._end or Gone()
        payload = b"".join(self._chunks)
        self._chunks.clear()
        self._backlog_bytes = 0
        return Data(payload, self._last)

    def push(self, part: Data | Failure | Gone) -> bool:
        """Take one record; false if it is the engine's last."""
        if not isinstance(part, Data):
            return self._finish(part)
        if self._backlog_bytes > MAX_BACKLOG_BYTES:
            self._streams.abort(self.id)
            return self._finish(SLOW_CLIENT)
        self._chunks.append(part.payload)
        self._backlog_bytes += len(part.payload)
        self._last = part.last
        self._wake()
        return not part.last

    def hand_over(self, socket: int) -> None:
        """The engine writes what follows to `socket`, but for the last part. Write nothing there until that comes."""
        self._streams.hand_over(self.id, socket)

    def comment(self) -> None:
        """Write a comment, which clients skip."""
        if self.takes_comments and not self._chunks and self._end is None:
            self._chunks.append(COMMENT)
            self._wake()

    def leave(self) -> None:
        """The client is gone."""
        self._finish(Gone())

    def close(self) -> None:
        """The task is done with it; aborts the request if the engine is not."""
        self._streams.close(self.id)

    def _finish(self, end: Failure | Gone) -> bool:
        if self._end is None:
            self._end = end
        self._wake()
        return False

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Streams:
    """All streams that the engine still writes to."""

    def __init__(
        self,
        engine: EngineHandle,
        sockets: SocketWriter | None = None,
        comment_seconds: float | None = COMMENT_SECONDS,
    ) -> None:
        """With `sockets`, event streams may be handed over to it."""
        self.comment_seconds = comment_seconds
        """How long nothing may come on a line that proxies must hold."""
        self._engine = engine
        self._sockets = sockets
        self._open: dict[int, Stream] = {}
        self._awaited: dict[int, OnUsed] = {}
        """Who is told of an open stream's tokens."""
        self._callers: dict[int, Caller] = {}
        """Of open streams that generate."""
        self._left: dict[int, OnUsed] = {}
        """The same of streams that were closed before their end."""
        self._next_id = 1

    def __len__(self) -> int:
        """Streams that the engine has not ended."""
        return len(self._open)

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Dispatch the engine's records on `loop`."""
        loop.add_reader(self._engine.event_fd, self.dispatch)

    def detach(self, loop: asyncio.AbstractEventLoop) -> None:
        loop.remove_reader(self._engine.event_fd)

    def open(
        self,
        request: bytes,
        tenant: int = 0,
        *,
        may_hand_over: bool = False,
        on_used: OnUsed | None = None,
        caller: Caller | None = None,
    ) -> Stream:
        """Submit a request (`GenerateRequest` as JSON). `may_hand_over`: it asks for an event stream, on a socket.

        `on_used` is called once the request has ended, if the engine began to serve it.
        """
        sockets = self._sockets if may_hand_over else None
        stream = self._add(is_announced=sockets is not None)
        if sockets is not None:
            sockets.announce(stream.id, MAX_BACKLOG_BYTES)
        if on_used is not None:
            self._awaited[stream.id] = on_used
        if caller is not None:
            self._callers[stream.id] = caller
        self._engine.submit(stream.id, tenant, request)
        return stream

    def callers(self) -> list[tuple[int, Caller]]:
        """The open streams that generate, oldest first."""
        return list(self._callers.items())

    def open_text(self, call: bytes, tenant: int = 0) -> Stream:
        """Submit a call that generates nothing (`plait.http.text_calls`)."""
        stream = self._add(is_announced=False)
        self._engine.submit_text(stream.id, tenant, call)
        return stream

    def _add(self, *, is_announced: bool) -> Stream:
        stream = Stream(self._next_id, self, is_announced=is_announced)
        self._next_id += 1
        self._open[stream.id] = stream
        return stream

    def dispatch(self) -> None:
        """Hand out everything that the engine has; records of streams that were closed are dropped."""
        for record in parse_records(self._engine.take()):
            if isinstance(record.part, Used):
                self._settle(record.stream, record.part)
                continue
            if isinstance(record.part, Failure):
                self._settle(record.stream, None)
            stream = self._open.get(record.stream)
            if stream is not None and not stream.push(record.part):
                self._open.pop(record.stream, None)

    def _settle(self, stream: int, used: Used | None) -> None:
        on_used = self._awaited.pop(stream, None) or self._left.pop(stream, None)
        if on_used is not None and used is not None:
            on_used(used)

    def comment(self) -> None:
        """Write a comment to every event stream that has begun, so that nobody takes the connection for dead.

        Nothing is written without ``comment_seconds``.
        """
        if self.comment_seconds is None:
            return
        for stream in self._open.values():
            stream.comment()
        if self._sockets is not None:
            self._sockets.comment(COMMENT)

    async def hold_lines(self) -> None:
        """Comment from time to time, until cancelled."""
        while self.comment_seconds is not None:
            await asyncio.sleep(self.comment_seconds)
            self.comment()

    def hand_over(self, stream: int, socket: int) -> None:
        """The engine writes to an announced stream's socket from now on."""
        if self._sockets is not None:
            self._sockets.hand_over(stream, socket, WRITE_SECONDS)

    def abort(self, stream: int) -> None:
        """Stop the engine's work for a stream."""
        self._engine.abort(stream)

    def close(self, stream: int) -> None:
        """Forget a stream; aborts the request if the engine has not ended it."""
        self._callers.pop(stream, None)
        if (on_used := self._awaited.pop(stream, None)) is not None:
            self._left[stream] = on_used
            if len(self._left) > MAX_UNSETTLED:  # the engine never began to serve the oldest ones
                self._left.pop(next(iter(self._left)))
        if self._open.pop(stream, None) is not None:
            self._engine.abort(stream)
            if self._sockets is not None:
                self._sockets.release(stream)
