"""Errors as OpenAI's clients read them, and Anthropic's."""

from __future__ import annotations

from http import HTTPStatus
from typing import NamedTuple

import msgspec
from starlette.types import Scope, Send

Headers = list[tuple[bytes, bytes]]

_INVALID = "invalid_request_error"


class ErrorKind(NamedTuple):
    """What an HTTP status means here; `docs/errors.md` lists them."""

    type: str
    """OpenAI's class of error: `error.type` of the body."""
    codes: tuple[str, ...]
    """Words for programs in `error.code`; without one it is null."""
    when: str


ERRORS = {
    400: ErrorKind(
        _INVALID,
        (
            "invalid_value",
            "unsupported_value",
            "context_length_exceeded",
            "no_chat_template",
            "chat_template_error",
        ),
        "The body is malformed, a value is out of range, or a field is not supported.",
    ),
    401: ErrorKind("authentication_error", ("invalid_api_key",), "The API key is missing or wrong."),
    403: ErrorKind(
        "permission_error",
        ("origin_not_allowed",),
        "A web page asks whose origin is not in --allowed-origins, or one asks the admin listener.",
    ),
    404: ErrorKind(_INVALID, ("model_not_found",), "The model or the path does not exist."),
    405: ErrorKind(_INVALID, (), "The path does not take this method."),
    408: ErrorKind(_INVALID, (), "Headers or body did not arrive in time."),
    409: ErrorKind(
        _INVALID,
        (),
        "The admin listener is asked for what the server does not do now: it loads, drains, takes a profile already, "
        "or has no folder for one.",
    ),
    410: ErrorKind(
        "request_ended",
        ("ended_by_operator",),
        "An operator ended the request. Clients do not send it again by themselves.",
    ),
    413: ErrorKind(_INVALID, (), "The body is too large."),
    429: ErrorKind(
        "rate_limit_error",
        ("queue_full", "rate_limit_exceeded"),
        "A queue is full, or the API key is at a bound of its own. Retry-After says when to try again.",
    ),
    431: ErrorKind(_INVALID, (), "The headers are too large, or too many."),
    500: ErrorKind(
        "internal_error",
        ("internal_error", "took_workers_down", "not_finite"),
        "A bug in Plait. Please report it. Or workers were lost twice while they computed the request, or the model "
        "computed NaN or infinity for it.",
    ),
    503: ErrorKind(
        "service_unavailable",
        ("service_unavailable", "slow_client"),
        "The engine loads, drains or failed, or the client read too slowly. Or no rank could write an operator's "
        "profile.",
    ),
    504: ErrorKind(
        "timeout_error",
        ("queue_timeout", "deadline_exceeded"),
        "The request, or one of its prompts, waited longer than --max-queue-seconds; Retry-After says when the queue "
        "should be shorter. Or it passed a deadline of the server's (`deadline_exceeded`). Or no step came that an "
        "operator's profile could have.",
    ),
}


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
    kind = ERRORS[status].type if status in ERRORS else _INVALID
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": param, "code": code}})


MESSAGES_PATH = "/v1/messages"
_ANTHROPIC = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Anthropic's class of an error, by its status; `api_error` for others."""


def is_of_messages(path: str) -> bool:
    """Whether Anthropic's API has this path."""
    return path == MESSAGES_PATH or path.startswith(f"{MESSAGES_PATH}/")


class _Told(msgspec.Struct):
    message: str
    param: str | None = None
    code: str | None = None


class _OpenAiBody(msgspec.Struct):
    error: _Told


def body_for(path: str, status: int, body: bytes) -> bytes:
    """An error's OpenAI `body` in the form of the API that has this path."""
    if not is_of_messages(path):
        return body
    message = msgspec.json.decode(body, type=_OpenAiBody).error.message
    kind = _ANTHROPIC.get(status, "api_error")
    return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": message}})


RESPONSES_PATH = "/v1/responses"
_NO_COUNT = (1 << 31) - 1
"""The `sequence_number` of an event whose stream's events were counted elsewhere: larger than theirs."""


def error_event(path: str, status: int, body: bytes) -> bytes:
    """The last event of a stream that fails, as the API that has this path writes it."""
    if path == RESPONSES_PATH:
        told = _response_error(body)
    elif path == MESSAGES_PATH:
        told = body_for(path, status, body)
    else:
        return b"data: " + body + b"\n\n"
    return b"event: error\ndata: " + told + b"\n\n"


def _response_error(body: bytes) -> bytes:
    """The data of the `error` event of `/v1/responses`."""
    error = msgspec.json.decode(body, type=_OpenAiBody).error
    event = {"type": "error", "code": error.code, "message": error.message, "param": error.param}
    return msgspec.json.encode(event | {"sequence_number": _NO_COUNT})


_MAX_SHOWN_CHARACTERS = 256
"""Of a path in an error message."""


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


async def send_error(scope: Scope, send: Send, error: ApiError, headers: Headers | None = None) -> None:
    """Answer with an error."""
    await send_json(send, error.status, body_for(scope["path"], error.status, error.body()), headers)
