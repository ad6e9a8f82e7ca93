"""The routes that generate, as raw ASGI: the engine's bytes go to the client as they are."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec
from starlette.types import Message, Receive, Scope, Send

from plait.http.api import GenerateRequest
from plait.http.body_reader import ServedNames
from plait.http.connection_limits import SOCKET, AnswerSocket, ClientGoneError, read_json_body
from plait.http.errors import ApiError, Headers, body_for, error_body, error_event, send_error, send_json
from plait.http.identity import ClientIdentity
from plait.http.key_terms import KeyTerms
from plait.http.quotas import OverQuotaError, Quotas
from plait.http.request_facts import also_told, caller_of
from plait.http.streams import COMMENT, Data, Failure, Gone, OnUsed, Stream, Streams
from plait.settings import HttpSettings

Reader = Callable[[bytes, ServedNames, ClientIdentity], GenerateRequest]

_STREAM_HEADERS: Headers = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class GenerateRoute:
    """ASGI app of one route: reads a body with `reader`, submits it, writes what the engine sends."""

    def __init__(
        self,
        reader: Reader,
        streams: Streams,
        served: ServedNames,
        http: HttpSettings,
        salt_key: bytes,
        quotas: Quotas,
    ) -> None:
        self._http = http
        self._salt_key = salt_key
        self._reader = reader
        self._streams = streams
        self._served = served
        self._quotas = quotas

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            client = ClientIdentity.of(scope, self._http, self._salt_key)
            request = self._reader(await read_json_body(scope, receive), self._served, client)
            request = KeyTerms.of(scope).apply(request)
        except ApiError as error:
            await send_error(scope, send, error, [(b"connection", b"close")] if error.status == 408 else None)
            return
        except ClientGoneError:
            return
        try:
            with self._quotas.request(scope) as on_used:
                await self._answer(request, scope, receive, send, on_used)
        except OverQuotaError as error:
            await send_error(scope, send, error, error.headers)

    async def _answer(
        self, request: GenerateRequest, scope: Scope, receive: Receive, send: Send, on_used: OnUsed | None
    ) -> None:
        path: str = scope["path"]
        socket = _plain_socket(scope) if request.stream else None
        stream = self._streams.open(
            msgspec.json.encode(request),
            request.tenant,
            may_hand_over=socket is not None,
            on_used=also_told(scope, on_used, request),
            caller=caller_of(scope),
        )
        watch = asyncio.create_task(leave_with_client(receive, stream))
        try:
            if request.stream:
                await _write_events(path, stream, socket, send, self._streams.comment_seconds)
            else:
                await write_whole(path, stream, send)
        finally:
            watch.cancel()
            stream.close()


async def leave_with_client(receive: Receive, stream: Stream) -> None:
    """End `stream` when its client is gone."""
    while (await receive())["type"] != "http.disconnect":
        pass
    stream.leave()


def _plain_socket(scope: Scope) -> AnswerSocket | None:
    socket = scope.get("extensions", {}).get(SOCKET)
    return socket if isinstance(socket, AnswerSocket) and socket.is_plain else None


async def _write_events(
    path: str, stream: Stream, socket: AnswerSocket | None, send: Send, comment_seconds: float | None
) -> None:
    """An event stream; a failure before its first byte still has its own status, and who left before has none."""
    part, has_begun = await _first_part(stream, send, comment_seconds)
    if not has_begun:
        if isinstance(part, Failure):
            await _write_failure(path, part, send)
        if not isinstance(part, Data):
            return
        await send(_stream_head())
    stream.takes_comments = not stream.is_announced
    while isinstance(part, Data):
        await send({"type": "http.response.body", "body": part.payload, "more_body": not part.last})
        if part.last:
            return
        part = await (stream.next() if socket is None or not stream.is_announced else _hand_over(stream, socket))
    if isinstance(part, Failure):
        await send({"type": "http.response.body", "body": error_event(path, part.status, part.body)})


def _stream_head() -> Message:
    return {"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS}


async def _first_part(stream: Stream, send: Send, comment_seconds: float | None) -> tuple[Data | Failure | Gone, bool]:
    """The engine's first part, and whether the stream has begun before it: with comments, so that proxies hold it."""
    has_begun = False
    while True:
        try:
            async with asyncio.timeout(comment_seconds):
                return await stream.next(), has_begun
        except TimeoutError:
            if not has_begun:
                await send(_stream_head())
            has_begun = True
            await send({"type": "http.response.body", "body": COMMENT, "more_body": True})


async def _hand_over(stream: Stream, socket: AnswerSocket) -> Data | Failure | Gone:
    """Leave the stream's middle to the engine; its last part, which is written here."""
    descriptor = await socket.hand_over()
    try:
        if descriptor is not None:
            stream.hand_over(descriptor)
        part = await stream.next()
    except OSError as error:
        message = f"the server could not open a file descriptor for this stream ({error}); try again later"
        part = Failure(503, 1, error_body(503, message, code="service_unavailable"))
    finally:
        socket.take_back()
    if isinstance(part, Gone):
        socket.abort()
    return part


async def write_whole(path: str, stream: Stream, send: Send) -> None:
    """One body, or the failure's own status."""
    body = bytearray()
    while True:
        part = await stream.next()
        if isinstance(part, Gone):
            return
        if isinstance(part, Failure):
            await _write_failure(path, part, send)
            return
        if part.last:
            await send_json(send, 200, bytes(body) + part.payload if body else part.payload)
            return
        body += part.payload


async def _write_failure(path: str, failure: Failure, send: Send) -> None:
    retry = failure.retry_after_seconds
    body = body_for(path, failure.status, failure.body)
    await send_json(send, failure.status, body, [(b"retry-after", b"%d" % retry)] if retry else None)
