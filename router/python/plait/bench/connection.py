"""HTTP/1.1 over one connection, reduced to what a load generator needs: bytes out, bytes in, the time of each read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import monotonic

import httptools

from plait.bench.messages import Go, Job, Outcome, Setup
from plait.bench.response import Response


class Exchange:
    """One request and its response so far."""

    __slots__ = ("body", "freed", "go", "response", "taken", "timer")

    def __init__(self, setup: Setup, job: Job, go: Go) -> None:
        self.go = go
        self.body = job.body
        self.taken = monotonic()
        self.response = Response(setup.streamed, setup.counting, job.keeps_ids)
        self.timer: asyncio.TimerHandle | None = None
        self.freed: float | None = None
        """When its connection was free again; None if it never had one."""

    def outcome(self) -> Outcome:
        response, usage = self.response, self.response.usage
        freed = self.freed or monotonic()
        return Outcome(
            index=self.go.index,
            intended=self.go.intended if self.go.intended is not None else self.taken,
            due=self.go.due if self.go.due is not None else self.taken,
            taken=self.taken,
            ended=response.ended if response.ended and response.failure is None else freed,
            freed=freed,
            failure=response.failure,
            detail=response.detail,
            finish_reason=response.finish_reason,
            num_prompt_tokens=usage.prompt_tokens if usage is not None else None,
            num_output_tokens=usage.completion_tokens if usage is not None else None,
            times=response.times.tobytes(),
            counts=response.counts.tobytes(),
            token_ids=response.token_ids,
        )


class Connection(asyncio.Protocol):
    """A connection that serves one exchange at a time. The event loop and httptools call its methods."""

    _transport: asyncio.Transport
    _parser: httptools.HttpResponseParser
    _exchange: Exchange | None = None
    _now = 0.0
    _num_served = 0
    _has_answered = False
    """Bytes of the response have arrived."""
    _ends_with_connection = False
    """The headers give no length: the response is complete when the server closes."""
    _tells_length = False

    def __init__(self, head: bytes, on_end: Callable[[Connection, Exchange, bool], None]) -> None:
        """`on_end` gets each exchange that ended, and whether the connection was stale: closed before any response."""
        self._head = head
        self._on_end = on_end

    def send(self, exchange: Exchange) -> None:
        """Write a request; `on_end` is called when its response is complete or has failed."""
        self._exchange = exchange
        self._has_answered = self._ends_with_connection = self._tells_length = False
        self._parser = httptools.HttpResponseParser(self)
        self._transport.write(b"%b%d\r\n\r\n%b" % (self._head, len(exchange.body), exchange.body))

    def is_open(self) -> bool:
        """Whether another request can be written."""
        return not self._transport.is_closing()

    def abort(self) -> None:
        """Drop the connection without closing it cleanly."""
        self._transport.abort()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Asyncio: connected."""
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Asyncio: bytes arrived. The time is taken before anything else."""
        self._now = monotonic()
        exchange = self._exchange
        if exchange is None:
            self._transport.abort()  # no request is open
            return
        self._has_answered = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            exchange.response.fail("no HTTP answer", str(error))
            self.abort()

    def connection_lost(self, error: Exception | None) -> None:
        """Asyncio: the connection is closed."""
        exchange, self._exchange = self._exchange, None
        if exchange is None:
            return
        is_stale = self._num_served > 0 and not self._has_answered and exchange.response.failure is None
        exchange.freed = None if is_stale else monotonic()
        if self._ends_with_connection and error is None:
            exchange.response.finish()
        elif exchange.response.is_complete:
            exchange.response.require_tokens()
        else:
            exchange.response.fail("closed before its end", str(error or "the server closed the connection"))
        self._on_end(self, exchange, is_stale)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Httptools: one header."""
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._tells_length = True

    def on_headers_complete(self) -> None:
        """Httptools: the status is known."""
        if self._exchange is not None:
            self._exchange.response.status = self._parser.get_status_code()
            self._ends_with_connection = self._exchange.response.status >= 200 and not self._tells_length

    def on_body(self, body: bytes) -> None:
        """Httptools: bytes of the body, without chunk framing."""
        if self._exchange is not None:
            self._exchange.response.feed(self._now, body)

    def on_message_complete(self) -> None:
        """Httptools: the response is complete."""
        exchange = self._exchange
        if exchange is None or exchange.response.status < 200:
            return  # an interim response, such as 100
        self._exchange = None
        self._num_served += 1
        exchange.freed = self._now
        exchange.response.finish()
        if not self._parser.should_keep_alive():
            self._transport.close()
        self._on_end(self, exchange, False)
