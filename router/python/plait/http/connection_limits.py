"""Limits of a connection: number, header bytes, body bytes, and seconds for each.

uvicorn's httptools protocol has none of these limits: it keeps headers of any size, and half-sent ones for ever. The
limits of a request's fields are the engine's.
"""

from __future__ import annotations

import asyncio
from typing import cast

from starlette.types import Receive, Scope
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from plait.http.errors import ApiError, error_body
from plait.http.heap_trim import OF_BODIES
from plait.http.request_ids import NAME, new_request_id

MAX_CONNECTIONS = 4096
MAX_HEADER_BYTES = 65_536
"""Request line and headers together."""
MAX_HEADERS = 256
"""Each costs some 150 bytes beside its own, in pieces that leave the heap in holes."""
MAX_BODY_BYTES = 8 << 20
"""Enough for a million token ids or two million words."""
HEADER_SECONDS = 10.0
BODY_SECONDS = 60.0
WRITE_SECONDS = 30.0
"""How long a client may leave the socket's buffer full."""
KEEP_ALIVE_SECONDS = 30


SOCKET = "plait.socket"
"""ASGI extension: the `AnswerSocket` of a request."""


class BoundedHttp(HttpToolsProtocol):
    """uvicorn's protocol with limits on connections, header bytes, header time and idle writes."""

    _header_bytes = 0
    """Of this request's line and its complete headers."""
    _num_headers = 0
    _partial_bytes = 0
    """Fed since the last complete header; the parser keeps them to itself."""
    _in_headers = False
    _header_timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None
    is_handed_over = False
    """Somebody else writes to the socket."""
    _requests: tuple[RequestResponseCycle, ...] = ()
    """Those whose answers were not complete when the last one came; a client may send several at once."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept the connection, or answer 503 if there are too many."""
        super().connection_made(transport)
        if len(self.connections) > MAX_CONNECTIONS:
            self._reject(503, f"{MAX_CONNECTIONS} connections are open, which is the limit; try again later")
            return
        self._start_header_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_header_timer()
        self._stop_write_timer()
        for request in self._requests:
            if not request.response_complete:
                request.disconnected = True
                request.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse; limit incomplete headers in bytes and in time."""
        if self._in_headers:
            self._partial_bytes += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._in_headers:
            self._bound_headers()
        elif self.cycle is not None and self.cycle.response_complete:
            self._rearm_keep_alive()

    def on_message_begin(self) -> None:
        self._in_headers = True
        self._header_bytes = self._partial_bytes = self._num_headers = 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_headers = False
        self._stop_header_timer()
        super().on_headers_complete()
        if self.cycle is not None:
            under_way = (request for request in self._requests if not request.response_complete)
            self._requests = (*under_way, self.cycle)
            # The request's task has not run yet.
            self.scope["extensions"] = cast("dict[str, dict[object, object]]", {SOCKET: AnswerSocket(self, self.cycle)})

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_headers += 1
        self._count(len(name) + len(value))
        super().on_header(name, value)

    def send_400_response(self, msg: str) -> None:
        """Answer what the parser, or `_count` within it, rejects."""
        if self._has_too_large_headers():
            self._reject_headers()
        else:
            self._reject(400, f"{msg} Send HTTP/1.1.")

    def pause_writing(self) -> None:
        """The client reads too slowly: it has `WRITE_SECONDS` to catch up."""
        super().pause_writing()
        self._write_timer = self.loop.call_later(WRITE_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        self._stop_write_timer()
        super().resume_writing()

    def _reject(self, status: int, message: str) -> None:
        if self.is_handed_over:
            self.transport.abort()
            return
        body = error_body(status, message)
        named = b"%b: %b\r\n" % (NAME, new_request_id())
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        self.transport.write(STATUS_LINE[status] + named + head + body)
        self.transport.close()

    def _count(self, num_bytes: int) -> None:
        self._header_bytes += num_bytes
        self._partial_bytes = 0
        if self._has_too_large_headers():
            raise ValueError("headers too large")  # the parser stops and calls send_400_response

    def _has_too_large_headers(self) -> bool:
        return self._header_bytes > MAX_HEADER_BYTES or self._num_headers > MAX_HEADERS

    def _bound_headers(self) -> None:
        if self._partial_bytes > MAX_HEADER_BYTES:
            self._reject_headers()
        elif self._header_timer is None:
            self._start_header_timer()

    def _reject_headers(self) -> None:
        self._reject(431, f"the limit is {MAX_HEADERS} headers of {MAX_HEADER_BYTES} bytes in all; send fewer")

    def _rearm_keep_alive(self) -> None:
        """Restart uvicorn's timer: line ends between two requests stop it and begin no message."""
        if self.timeout_keep_alive_task is None:
            self.timeout_keep_alive_task = self.loop.call_later(KEEP_ALIVE_SECONDS, self.timeout_keep_alive_handler)

    def _start_header_timer(self) -> None:
        self._header_timer = self.loop.call_later(HEADER_SECONDS, self._headers_late)

    def _headers_late(self) -> None:
        if not self.transport.is_closing():
            self._reject(408, f"the headers did not come within {HEADER_SECONDS:.0f} s")

    def _stop_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None


class AnswerSocket:
    """The socket that one request's answer goes to."""

    def __init__(self, connection: BoundedHttp, request: RequestResponseCycle) -> None:
        self._connection = connection
        self._request = request

    @property
    def is_plain(self) -> bool:
        """Bytes go to it as they are, without TLS."""
        return self._connection.transport.get_extra_info("sslcontext") is None

    async def hand_over(self) -> int | None:
        """Its descriptor once all is written, for somebody else to write to; None if it is closed."""
        transport = self._connection.transport
        if not transport.is_closing():
            transport.set_write_buffer_limits(high=0)
        await self._connection.flow.drain()
        if transport.is_closing():
            return None
        transport.set_write_buffer_limits()
        self._connection.is_handed_over = True
        return int(transport.get_extra_info("socket").fileno())

    def take_back(self) -> None:
        """The transport writes again."""
        self._connection.is_handed_over = False

    def abort(self) -> None:
        """The client is gone."""
        self._request.disconnected = True
        if not self._connection.transport.is_closing():
            self._connection.transport.abort()


class ClientGoneError(Exception):
    """The client closed the connection."""


async def read_json_body(scope: Scope, receive: Receive) -> bytes:
    """The request's body; raises `ApiError` if it is too large, too slow or not declared as JSON."""
    headers = dict(scope["headers"])
    _check_type(headers.get(b"content-type", b""))
    _check_encoding(headers.get(b"content-encoding", b"identity"))
    if int(headers.get(b"content-length", b"0")) > MAX_BODY_BYTES:
        raise _too_large()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            return await _read(receive)
    except TimeoutError:
        raise ApiError(408, f"the body did not come within {BODY_SECONDS:.0f} s") from None


async def _read(receive: Receive) -> bytes:
    body = bytearray()
    try:
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGoneError
            body += message["body"]
            if len(body) > MAX_BODY_BYTES:
                raise _too_large()
            if not message["more_body"]:
                return bytes(body)
    finally:
        OF_BODIES.after_body(len(body))


def _check_type(content_type: bytes) -> None:
    """Require JSON's type: a web page may send any other type here without asking (CORS)."""
    kind = content_type.partition(b";")[0].strip().lower()
    if kind != b"application/json":
        given = kind.decode("latin-1") or "missing"
        raise ApiError(400, f"the Content-Type is {given}; send JSON with `Content-Type: application/json`")


def _check_encoding(encoding: bytes) -> None:
    if encoding.strip().lower() != b"identity":
        given = encoding.decode("latin-1")
        raise ApiError(400, f"the Content-Encoding is {given}; this server reads plain bodies, send it without one")


def _too_large() -> ApiError:
    return ApiError(413, f"the body has over {MAX_BODY_BYTES} bytes, which is the limit; shorten the prompt")
