"""The outermost app: gives each answer its request id and tells its watchers of it; one writes the log's line."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from plait.http.answers import Answer
from plait.http.request_facts import MAX_PATH_CHARACTERS, OnUse, RequestFacts, collect_facts, key_name
from plait.http.request_ids import REQUEST_ID, request_id
from plait.log import Field, log, writes_json

OnEnd = Callable[[Scope, RequestFacts, Answer], None]


class Identified:
    """ASGI app around all others: even a bug's answer has an id."""

    def __init__(self, app: ASGIApp, on_end: Sequence[OnEnd] = (), on_use: OnUse | None = None) -> None:
        """`on_end` are told of each answer, `on_use` of what the engine says that a request took."""
        self._app = app
        self._on_end = tuple(on_end)
        self._on_use = on_use

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope[REQUEST_ID] = request_id(scope)
        answer = Answer(scope[REQUEST_ID], send)
        facts = collect_facts(scope, self._on_use) if self._on_end or self._on_use else None
        try:
            await self._app(scope, receive, answer.send)
        finally:
            answer.end()
            if facts is not None:
                for tell in self._on_end:
                    tell(scope, facts, answer)


def log_request(scope: Scope, facts: RequestFacts, answer: Answer) -> None:
    """Write the line of a request: no body, no query, no key, but the key's name or the beginning of its SHA-256."""
    path = scope["path"][:MAX_PATH_CHARACTERS]
    fields: dict[str, Field] = {
        "request_id": answer.request.decode(),
        "method": scope["method"],
        "path": path if writes_json() else json.dumps(path),
        "status": answer.status or None,
        "end": "whole" if answer.is_whole else "cut_off",
        "head_seconds": _rounded(answer.head_after),
        "seconds": _rounded(answer.seconds),
        **facts.fields(),
        "key": key_name(scope) or None,
    }
    log("http", "request ended" if writes_json() else "", fields=fields)


def _rounded(seconds: float | None) -> float | None:
    """To milliseconds."""
    return None if seconds is None else round(seconds, 3)
