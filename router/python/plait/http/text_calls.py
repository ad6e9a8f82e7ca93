"""Calls that generate nothing: `/tokenize`, `/detokenize`, `/tokenizer_info` and the two that count an input's tokens.

The text threads answer them, in turns with the requests. A prompt is read as its own route reads it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple

import msgspec
from starlette.types import Receive, Scope, Send

from plait.http.api import GenerateRequest
from plait.http.bodies import Integer
from plait.http.body_errors import field_error
from plait.http.body_reader import ServedNames, decode_with_fields, served_name
from plait.http.connection_limits import ClientGoneError, read_json_body
from plait.http.errors import ApiError, send_error
from plait.http.generate import leave_with_client, write_whole
from plait.http.identity import ClientIdentity
from plait.http.messages import read_message_to_count
from plait.http.responses import read_response
from plait.http.streams import Streams
from plait.http.validate import ANONYMOUS, read_chat, read_completion
from plait.settings import HttpSettings


class TokenizeBody(msgspec.Struct, kw_only=True):
    """Body of `POST /tokenize`: a text, or the fields of a chat."""

    prompt: str | None = None
    return_token_strs: bool | None = None
    """Tokens by their names, too."""


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """Body of `POST /detokenize`."""

    tokens: list[Integer]
    model: str | None = None


class TextCall(NamedTuple):
    """What the engine is asked: JSON that `plait-openai` mirrors, and whose turn it takes."""

    json: bytes
    tenant: int


Reader = Callable[[bytes, ServedNames, ClientIdentity], TextCall]
TOKENIZER_INFO = msgspec.json.encode({"call": "tokenizer_info"})


def read_tokenize(raw: bytes, served: ServedNames, client: ClientIdentity = ANONYMOUS) -> TextCall:
    """The call in the body of `POST /tokenize`; raises `ApiError`."""
    body, fields = decode_with_fields(raw, TokenizeBody, {})
    if "messages" not in fields and body.prompt is None:
        raise field_error("prompt", "is missing; send a text, or `messages`")
    request = (read_chat if "messages" in fields else read_completion)(raw, served, client)
    return _call("tokenize", request, return_token_strs=bool(body.return_token_strs))


def read_detokenize(raw: bytes, served: ServedNames, client: ClientIdentity = ANONYMOUS) -> TextCall:
    """The call in the body of `POST /detokenize`; raises `ApiError`."""
    body, _ = decode_with_fields(raw, DetokenizeBody, {})
    served_name(body.model, served)
    return TextCall(msgspec.json.encode({"call": "detokenize", "tokens": body.tokens}), client.tenant(None))


def read_response_to_count(raw: bytes, served: ServedNames, client: ClientIdentity = ANONYMOUS) -> TextCall:
    """The call in the body of `POST /v1/responses/input_tokens`; raises `ApiError`."""
    return _call("count_tokens", read_response(raw, served, client))


def count_message(raw: bytes, served: ServedNames, client: ClientIdentity = ANONYMOUS) -> TextCall:
    """The call in the body of `POST /v1/messages/count_tokens`; raises `ApiError`."""
    return _call("count_tokens", read_message_to_count(raw, served, client))


def _call(name: str, request: GenerateRequest, **fields: bool) -> TextCall:
    asked = {"call": name} | fields | msgspec.structs.asdict(request)
    return TextCall(msgspec.json.encode(asked), request.tenant)


class TextRoute:
    """ASGI app of one route: reads a body with `reader`, lets the text threads answer, writes that."""

    def __init__(
        self, reader: Reader, streams: Streams, served: ServedNames, http: HttpSettings, salt_key: bytes
    ) -> None:
        self._reader = reader
        self._streams = streams
        self._served = served
        self._http = http
        self._salt_key = salt_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        client = ClientIdentity.of(scope, self._http, self._salt_key)
        try:
            call = self._reader(await read_json_body(scope, receive), self._served, client)
        except ApiError as error:
            await send_error(scope, send, error, [(b"connection", b"close")] if error.status == 408 else None)
            return
        except ClientGoneError:
            return
        stream = self._streams.open_text(call.json, call.tenant)
        watch = asyncio.create_task(leave_with_client(receive, stream))
        try:
            await write_whole(scope["path"], stream, send)
        finally:
            watch.cancel()
            stream.close()


class InfoRoute:
    """ASGI app of `/tokenizer_info`, which has no body."""

    def __init__(self, streams: Streams, http: HttpSettings, salt_key: bytes) -> None:
        self._streams = streams
        self._http = http
        self._salt_key = salt_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        tenant = ClientIdentity.of(scope, self._http, self._salt_key).tenant(None)
        stream = self._streams.open_text(TOKENIZER_INFO, tenant)
        try:
            await write_whole(scope["path"], stream, send)
        finally:
            stream.close()
