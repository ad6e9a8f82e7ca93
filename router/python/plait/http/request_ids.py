"""Request ids: taken from the client or made, and in the head of every answer."""

from __future__ import annotations

import os
import re

from starlette.types import Scope

NAME = b"x-request-id"
REQUEST_ID = "plait.request_id"
"""The scope's entry with the request's id."""
MAX_REQUEST_ID_BYTES = 128
_TAKEN = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,%d}" % MAX_REQUEST_ID_BYTES)


def new_request_id() -> bytes:
    """A random one, 32 hexadecimal digits."""
    return os.urandom(16).hex().encode()


def request_id(scope: Scope) -> bytes:
    """The client's id; a new one if it sent none, or one that is too long or could forge a line of the log."""
    headers: list[tuple[bytes, bytes]] = scope["headers"]
    given = next((value for name, value in headers if name == NAME), b"")
    return given if _TAKEN.fullmatch(given) else new_request_id()
