"""One request's answer as the outermost app sees it."""

from __future__ import annotations

import time

from starlette.types import Message, Send

from plait.http.request_ids import NAME


class Answer:
    """While it is written, and then what became of it."""

    def __init__(self, request: bytes, send: Send) -> None:
        """`request` is its id."""
        self.request = request
        self._send = send
        self._began = time.monotonic()
        self.began_ns = time.time_ns()
        """Since the epoch."""
        self.head_after: float | None = None
        """Seconds."""
        self.seconds = 0.0
        """Once it has ended."""
        self.status = 0
        """0: there was no head."""
        self.is_whole = False

    async def send(self, message: Message) -> None:
        """Pass on a part; the head has the id."""
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", []), (NAME, self.request)]
            self.status = message["status"]
            self.head_after = time.monotonic() - self._began
        else:
            self.is_whole = not message.get("more_body", False)
        await self._send(message)

    def end(self) -> None:
        self.seconds = time.monotonic() - self._began
