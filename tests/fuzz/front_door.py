"""The HTTP server over a socket, with an engine that answers every request at once."""

from __future__ import annotations

import asyncio
import errno
import re
import socket
import threading
from functools import cache

from plait.http.app import build_app
from plait.http.engine import read_description
from plait.http.server import http_server
from plait.http.streams import Streams
from plait_testing.in_memory_engine import LAST, InMemoryEngine, record

STATUS = re.compile(rb"(?:^|\r\n|\})HTTP/1\.[01] (\d{3}) ")
SECONDS = 60.0


class _AnsweringEngine(InMemoryEngine):
    def submit(self, stream: int, tenant: int, request: bytes) -> None:
        super().submit(stream, tenant, request)
        del self.submitted[stream], self.tenants[stream]
        self.send(record(stream, b'{"ok":1}', LAST))

    def abort(self, stream: int) -> None:
        """Nothing is kept of it."""


@cache
def _port() -> int:
    """Of a server that runs until the process ends."""
    engine, listener = _AnsweringEngine(), socket.create_server(("127.0.0.1", 0))
    streams = Streams(engine)
    server = http_server(build_app(engine, streams, read_description(engine), None))

    async def serve() -> None:
        streams.attach(asyncio.get_running_loop())
        await server.serve(sockets=[listener])

    threading.Thread(target=lambda: asyncio.run(serve()), daemon=True).start()
    port: int = listener.getsockname()[1]
    return port


def answer_to(raw: bytes) -> list[int]:
    """The statuses of all answers to these bytes, after which the client says nothing more."""
    answer = bytearray()
    with socket.create_connection(("127.0.0.1", _port()), timeout=SECONDS) as client:
        try:
            client.sendall(raw)
            client.shutdown(socket.SHUT_WR)
            while piece := client.recv(65_536):
                answer += piece
        except ConnectionError:
            pass  # it hung up, which is an answer to rubbish
        except OSError as error:
            if error.errno != errno.ENOTCONN:
                raise
    return [int(status) for status in STATUS.findall(bytes(answer))]
