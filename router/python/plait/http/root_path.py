"""A beginning that a proxy has put before all paths."""

from __future__ import annotations

import re

from starlette.types import ASGIApp, Receive, Scope, Send

from plait.errors import SettingsError

_ROOT_PATH = re.compile(r"(/[A-Za-z0-9_~-][A-Za-z0-9._~-]*)+")
_API = "/v1"


def check_root_path(root: str) -> None:
    """Raise `SettingsError` if it is no path, or cannot be told from a path of the API."""
    if _ROOT_PATH.fullmatch(root) is None:
        raise SettingsError(
            f"--root-path is {root!r}; give a path that begins with / and does not end with it, of letters, digits and "
            "._~-, such as /llm"
        )
    if f"{root}/".startswith(f"{_API}/"):
        raise SettingsError(
            f"--root-path is {root!r}, but paths of the API begin with {_API}; choose another, say /llm"
        )


class TakeRootPath:
    """ASGI middleware that takes the beginning off: what is behind it sees the API's own paths only."""

    def __init__(self, app: ASGIApp, root: str) -> None:
        self._app = app
        self._root = root.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["raw_path"].startswith(self._root + b"/"):
            # The root has no percent signs: it is as long in both.
            at = len(self._root)
            scope["raw_path"], scope["path"] = scope["raw_path"][at:], scope["path"][at:]
        await self._app(scope, receive, send)
