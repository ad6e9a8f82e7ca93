"""A client process: reads requests from standard input, sends them on order, writes their outcomes to standard output.

`python -m plait.bench.client`; the benchmark starts as many as the load needs.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import resource
import ssl
import sys
import time
from time import monotonic
from typing import Any

import msgspec
import uvloop

from plait.bench.connection import Connection, Exchange
from plait.bench.messages import (
    LENGTH_BYTES,
    NO_SOCKET,
    Begin,
    Finish,
    FromClient,
    Go,
    Job,
    Ready,
    Report,
    Setup,
    ToClient,
    frame,
    frame_length,
)
from plait.bench.percentiles import percentile

TICK_SECONDS = 0.005
"""Interval at which the event loop's lag is measured."""
NO_SOCKET_ERRORS = {errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS}
"""This machine's limits on descriptors, ports and buffers: the request never reached the server."""
LEAST_WAIT_SECONDS = 0.001
"""The loop's timers count milliseconds; a shorter wait would be none."""


class LagWatch:
    """Measures how late the event loop is for a periodic timer."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lags: list[float] = []
        self._begun = monotonic()
        self._cpu_begun = time.process_time()
        self._expected = self._begun + TICK_SECONDS
        self._wait()

    def _wait(self) -> None:
        self._loop.call_later(max(LEAST_WAIT_SECONDS, self._expected - monotonic()), self._tick)

    def _tick(self) -> None:
        # One lag for each missed tick: a blocked loop is late more than once.
        now = monotonic()
        while self._expected <= now:
            self._lags.append(now - self._expected)
            self._expected += TICK_SECONDS
        self._wait()

    def report(self, num_resent: int, in_flight: list[float]) -> Report:
        """The lags and the CPU share since the start, with counts of the client's requests."""
        lags = sorted(self._lags) or [0.0]
        cpu_share = (time.process_time() - self._cpu_begun) / max(1e-9, monotonic() - self._begun)
        return Report(max(0.0, percentile(lags, 99)), max(0.0, lags[-1]), cpu_share, num_resent, in_flight)


class Client:
    """All requests of one process."""

    _setup: Setup
    _tls: ssl.SSLContext | None = None
    _watch: LagWatch

    def __init__(self, loop: asyncio.AbstractEventLoop, out: asyncio.WriteTransport) -> None:
        self._loop = loop
        self._out = out
        self._jobs: dict[int, Job] = {}
        self._in_flight: dict[int, float] = {}
        """When each request was taken up, by index."""
        self._idle: list[Connection] = []
        self._connecting: set[asyncio.Task[None]] = set()
        self._num_resent = 0

    def take(self, message: ToClient) -> None:
        """Handle a message of the benchmark."""
        match message:
            case Setup():
                self._setup = message
                self._tls = ssl.create_default_context() if message.tls_name is not None else None
            case Job():
                self._jobs[message.index] = message
            case Begin():
                self._begin()
            case Go():
                exchange = Exchange(self._setup, self._jobs.pop(message.index), message)
                self._in_flight[message.index] = exchange.taken
                self._start(exchange)
            case Finish():
                self._say(self._watch.report(self._num_resent, list(self._in_flight.values())))

    def _begin(self) -> None:
        gc.freeze()
        gc.disable()  # a run is bounded, and a collection would hold up every stream
        self._watch = LagWatch(self._loop)
        self._say(Ready())

    def _say(self, message: FromClient) -> None:
        self._out.write(frame(message))

    def _start(self, exchange: Exchange) -> None:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open():
                self._send(connection, exchange)
                return
        self._connect(exchange)

    def _send(self, connection: Connection, exchange: Exchange) -> None:
        exchange.timer = self._loop.call_later(self._setup.timeout_seconds, self._time_out, connection, exchange)
        connection.send(exchange)

    def _connect(self, exchange: Exchange) -> None:
        task = self._loop.create_task(self._send_on_a_new_connection(exchange))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    async def _send_on_a_new_connection(self, exchange: Exchange) -> None:
        try:
            async with asyncio.timeout(self._setup.timeout_seconds):
                connection = await self._open()
        except ConnectionRefusedError as error:
            exchange.response.fail("connection refused", str(error))
        except TimeoutError:
            exchange.response.fail("timed out", f"no connection within {self._setup.timeout_seconds:g} s")
        except OSError as error:
            kind = NO_SOCKET if error.errno in NO_SOCKET_ERRORS else "connection failed"
            exchange.response.fail(kind, str(error))
        else:
            self._send(connection, exchange)
            return
        self._close(exchange)

    async def _open(self) -> Connection:
        setup = self._setup
        _, connection = await self._loop.create_connection(
            lambda: Connection(setup.head, self._on_end),
            setup.address,
            setup.port,
            ssl=self._tls,
            server_hostname=setup.tls_name,
        )
        return connection

    def _on_end(self, connection: Connection, exchange: Exchange, is_stale: bool) -> None:
        if is_stale:
            # The server may close an idle connection at any time. It sent nothing, but may have read the request.
            self._num_resent += 1
            exchange.response.failure = None
            self._forget_timer(exchange)
            self._connect(exchange)
            return
        self._close(exchange)
        if connection.is_open():
            self._idle.append(connection)

    def _time_out(self, connection: Connection, exchange: Exchange) -> None:
        left = exchange.taken + self._setup.timeout_seconds - monotonic()
        if left > 0:  # the loop's timers count from the begin of its turn
            exchange.timer = self._loop.call_later(max(LEAST_WAIT_SECONDS, left), self._time_out, connection, exchange)
            return
        exchange.response.fail("timed out", f"no end within {self._setup.timeout_seconds:g} s")
        connection.abort()

    def _close(self, exchange: Exchange) -> None:
        self._forget_timer(exchange)
        del self._in_flight[exchange.go.index]
        self._say(exchange.outcome())

    def _forget_timer(self, exchange: Exchange) -> None:
        if exchange.timer is not None:
            exchange.timer.cancel()


async def _serve_bench() -> None:
    """Serve until the benchmark ends this process or exits."""
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(_crash)
    reader = asyncio.StreamReader(limit=1 << 24)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    out, _ = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, sys.stdout.buffer)
    client, decoder = Client(loop, out), msgspec.msgpack.Decoder(ToClient)
    while True:
        length = frame_length(await reader.readexactly(LENGTH_BYTES))
        client.take(decoder.decode(await reader.readexactly(length)))


def _crash(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Exit on an exception that no task awaits: without an outcome the benchmark would wait forever."""
    loop.default_exception_handler(context)
    os._exit(1)


def main() -> None:
    """Serve one run of the bench, with as many sockets as the system lets it have."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    try:
        uvloop.run(_serve_bench())
    except asyncio.IncompleteReadError:
        sys.exit(1)


if __name__ == "__main__":
    main()
