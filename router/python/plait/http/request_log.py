"""The outermost app: gives each answer its request id and writes the request's line in the log."""

from __future__ import annotations

import json
import time
from datetime import datetime

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from plait.http.request_facts import MAX_PATH_CHARACTERS, RequestFacts, collect_facts, key_name
from plait.http.request_ids import NAME, REQUEST_ID, request_id
from plait.output import forward_to_stderr


class Identified:
    """ASGI app around all others: even a bug's answer has an id."""

    def __init__(self, app: ASGIApp, *, logs_requests: bool) -> None:
        self._app = app
        self._logs_requests = logs_requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope[REQUEST_ID] = request_id(scope)
        answer = _Answer(scope[REQUEST_ID], send)
        facts = collect_facts(scope) if self._logs_requests else None
        try:
            await self._app(scope, receive, answer.send)
        finally:
            if facts is not None:
                forward_to_stderr(answer.line(scope, facts).encode())


class _Answer:
    """One request's answer while it is written."""

    def __init__(self, request: bytes, send: Send) -> None:
        self._request = request
        self._send = send
        self._began = time.monotonic()
        self._head_after: float | None = None
        """Seconds."""
        self._status = 0
        self._is_whole = False

    async def send(self, message: Message) -> None:
        """Pass on a part; the head has the id."""
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", []), (NAME, self._request)]
            self._status = message["status"]
            self._head_after = time.monotonic() - self._began
        else:
            self._is_whole = not message.get("more_body", False)
        await self._send(message)

    def line(self, scope: Scope, facts: RequestFacts) -> str:
        """What the log says: no body, no query, no key. `key` is the key's name, or the beginning of its SHA-256."""
        now = datetime.now().strftime("%Y-%m-%d %H:%M:%S,%f")[:-3]
        head = "-" if self._head_after is None else f"{self._head_after:.3f}"
        key = key_name(scope) or "-"
        return (
            f"{now} INFO http: request_id={self._request.decode()} method={scope['method']} "
            f"path={json.dumps(scope['path'][:MAX_PATH_CHARACTERS])} status={self._status or '-'} "
            f"end={'whole' if self._is_whole else 'cut_off'} head_seconds={head} "
            f"seconds={time.monotonic() - self._began:.3f} {facts.shown()} key={key}\n"
        )
