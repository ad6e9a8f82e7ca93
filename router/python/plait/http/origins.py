"""Which web pages' scripts may ask the server (CORS). Without a list, browsers keep them all from it."""

from __future__ import annotations

import re
from collections.abc import Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from plait.errors import SettingsError
from plait.http.errors import ApiError, Headers, send_error

ANY = "*"
_ORIGIN = re.compile(r"https?://(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(:\d{1,5})?")
_MAX_SHOWN_CHARACTERS = 256
_PREFLIGHT_SECONDS = 600
"""How long a browser keeps an answer to a preflight."""


def check_origins(origins: Sequence[str]) -> None:
    """Raise `SettingsError` for a word that no browser sends as an origin."""
    for origin in origins:
        if origin != ANY and _ORIGIN.fullmatch(origin) is None:
            raise SettingsError(
                f"--allowed-origins has {origin!r}, which is no origin; give SCHEME://HOST or SCHEME://HOST:PORT in "
                "lower case without a path, or *, and write MODEL before --allowed-origins"
            )


class AllowOrigins:
    """ASGI middleware that answers preflights, which have no key, and lets listed pages read the answers."""

    def __init__(self, app: ASGIApp, origins: Sequence[str]) -> None:
        self._app = app
        self._allows_any = ANY in origins
        self._origins = frozenset(origin.encode() for origin in origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"]) if scope["type"] == "http" else {}
        origin: bytes | None = headers.get(b"origin")
        if origin is None:
            await self._app(scope, receive, send)
        elif scope["method"] == "OPTIONS" and b"access-control-request-method" in headers:
            await self._answer_preflight(scope, send, origin, headers.get(b"access-control-request-headers", b""))
        else:
            await self._app(scope, receive, _with_headers(send, self._named(origin)))

    async def _answer_preflight(self, scope: Scope, send: Send, origin: bytes, asked: bytes) -> None:
        if not (named := self._named(origin)):
            shown = origin.decode("latin-1")[:_MAX_SHOWN_CHARACTERS]
            message = (
                f"pages of the origin {shown!r} may not ask this server; its operator lists it in --allowed-origins"
            )
            await send_error(scope, send, ApiError(403, message, code="origin_not_allowed"))
            return
        allowed: Headers = [
            *named,
            (b"access-control-allow-methods", b"GET, HEAD, POST"),
            (b"access-control-allow-headers", asked),
            (b"access-control-max-age", b"%d" % _PREFLIGHT_SECONDS),
        ]
        await send({"type": "http.response.start", "status": 204, "headers": allowed})
        await send({"type": "http.response.body", "body": b""})

    def _named(self, origin: bytes) -> Headers:
        """The headers with which a browser lets the origin's scripts read an answer; none if it is not listed."""
        if self._allows_any:
            return [(b"access-control-allow-origin", b"*"), _EXPOSED]
        if origin not in self._origins:
            return []
        return [(b"access-control-allow-origin", origin), (b"vary", b"origin"), _EXPOSED]


_EXPOSED = (b"access-control-expose-headers", b"x-request-id, retry-after")


def _with_headers(send: Send, more: Headers) -> Send:
    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", []), *more]
        await send(message)

    return send_with_headers
