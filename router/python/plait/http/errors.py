"""Errors as OpenAI's clients read them."""

from __future__ import annotations

from http import HTTPStatus

import msgspec
from starlette.types import Send

Headers = list[tuple[bytes, bytes]]

_TYPES = {401: "authentication_error", 429: "rate_limit_error", 500: "internal_error", 503: "service_unavailable"}


class ApiError(Exception):
    """A request is rejected; the message says what was given, what is allowed and what to do."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code

    def body(self) -> bytes:
        """OpenAI's error body."""
        return error_body(self.status, self.message, self.param, self.code)


def error_body(status: int, message: str, param: str | None = None, code: str | None = None) -> bytes:
    """`{"error": {"message", "type", "param", "code"}}` as JSON."""
    kind = _TYPES.get(status, "invalid_request_error")
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": param, "code": code}})


_MAX_SHOWN_CHARACTERS = 256
"""Of a path: enough to know it again."""


def path_error(status: int, method: str, path: str, allowed: str) -> ApiError:
    """The error for an unknown path (404) or a method that is not `allowed` (405)."""
    path = path[:_MAX_SHOWN_CHARACTERS]
    if status == HTTPStatus.NOT_FOUND:
        return ApiError(status, f"there is no path {path!r}; GET /openapi.json lists those that exist")
    if status == HTTPStatus.METHOD_NOT_ALLOWED:
        return ApiError(status, f"{method} is not allowed on {path!r}; send {allowed}")
    return ApiError(status, f"{method} {path!r} failed: {HTTPStatus(status).phrase}")


async def send_json(send: Send, status: int, body: bytes, headers: Headers | None = None) -> None:
    """Answer with one JSON body."""
    head = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)), *(headers or [])]
    await send({"type": "http.response.start", "status": status, "headers": head})
    await send({"type": "http.response.body", "body": body})


async def send_error(send: Send, error: ApiError, headers: Headers | None = None) -> None:
    """Answer with an error."""
    await send_json(send, error.status, error.body(), headers)
