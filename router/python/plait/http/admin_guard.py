"""Keeps web pages away from the admin listener: a browser on the operator's machine reaches loopback too."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from plait.http.errors import ApiError, send_error


class RefuseOtherPages:
    """ASGI middleware: a request that a page of another origin sends is refused.

    Without keys, so is one whose Host is a name other than localhost: a page's own name may be made to mean loopback.
    """

    def __init__(self, app: ASGIApp, *, has_keys: bool) -> None:
        self._app = app
        self._has_keys = has_keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (problem := self._problem(dict(scope["headers"]))) is not None:
            await send_error(scope, send, ApiError(403, problem, code="origin_not_allowed"))
            return
        await self._app(scope, receive, send)

    def _problem(self, headers: dict[bytes, bytes]) -> str | None:
        host = headers.get(b"host", b"").decode("latin-1")
        origin = headers.get(b"origin")
        if origin is not None and not (host and _authority(origin.decode("latin-1")) == host):
            return "a web page of another origin asks the admin listener; open the listener's own page, or use curl"
        if not self._has_keys and host and not _is_address(host):
            return (
                f"the admin listener is asked as {host[:256]!r}, and has no --admin-key-file; ask it by its address, "
                "such as 127.0.0.1, or give it keys"
            )
        return None


def _authority(origin: str) -> str:
    """Host and port; empty if it is no URL."""
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return ""


def _is_address(host: str) -> bool:
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or bool(ipaddress.ip_address(name))
    except ValueError:
        return False
