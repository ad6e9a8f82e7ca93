"""Bodies of the admin listener: small JSON objects."""

from __future__ import annotations

import asyncio
from typing import Annotated, TypeVar

import msgspec
from fastapi import Request, Response
from msgspec import Meta
from starlette.requests import ClientDisconnect

from plait.http.connection_limits import BODY_SECONDS
from plait.http.errors import ApiError
from plait.http.whole_numbers import decode_struct

T = TypeVar("T", bound=msgspec.Struct)
MAX_BODY_BYTES = 4096
MAX_DRAIN_SECONDS = 86_400
MAX_PROFILED_STEPS = 100
"""Events of a large model's step take a rank up to a tenth of a second to gather; streams wait for them."""
MAX_PROFILE_SECONDS = 3600


class DrainBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of `POST /admin/drain`."""

    deadline_seconds: Annotated[float, Meta(ge=0, le=MAX_DRAIN_SECONDS)] | None = None


class ProfileBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of `POST /admin/profile`."""

    steps: Annotated[int, Meta(ge=1, le=MAX_PROFILED_STEPS)] = 10
    deadline_seconds: Annotated[float, Meta(gt=0, le=MAX_PROFILE_SECONDS)] = 60.0


async def read_body(request: Request, shape: type[T]) -> T:
    """The body; an empty one is `{}`."""
    try:
        async with asyncio.timeout(BODY_SECONDS):
            raw = await _read_all(request)
    except TimeoutError:
        raise ApiError(408, f"the body did not come within {BODY_SECONDS:.0f} s; send it whole") from None
    except ClientDisconnect:
        raise ApiError(408, "the client left before its body had come") from None
    try:
        return decode_struct(raw or b"{}", shape)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        fields = ", ".join(shape.__struct_fields__)
        raise ApiError(400, f"the body is not as it should be: {error}; send a JSON object with {fields}") from error


def json_response(body: object) -> Response:
    """Any value as JSON."""
    return Response(msgspec.json.encode(body), media_type="application/json")


async def _read_all(request: Request) -> bytes:
    raw = bytearray()
    async for part in request.stream():
        raw += part
        if len(raw) > MAX_BODY_BYTES:
            raise ApiError(413, f"the body has over {MAX_BODY_BYTES} bytes; send a small JSON object")
    return bytes(raw)
