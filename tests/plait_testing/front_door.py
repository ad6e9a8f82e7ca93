"""The HTTP server over a real socket, with the engine's side in memory."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import httpx
from plait.http.app import build_app
from plait.http.auth import ApiKeys
from plait.http.engine import SocketWriter, read_description
from plait.http.front_metrics import FrontMetrics
from plait.http.request_log import OnEnd, log_request
from plait.http.server import http_server
from plait.http.streams import Streams
from plait.proxy_settings import ProxySettings
from plait.settings import HttpSettings

from plait_testing.in_memory_engine import InMemoryEngine

CHAT = "/v1/chat/completions"
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}


@dataclass
class Door:
    """A running front door, and the engine behind it."""

    url: str
    engine: InMemoryEngine
    port: int
    loop: SkippingLoop

    def wait_for(self, num_submitted: int) -> int:
        """The stream id of the `num_submitted`th request, once it is there."""
        self.engine.wait_for(lambda: len(self.engine.submitted) >= num_submitted)
        return max(self.engine.submitted)

    def wait_for_abort(self) -> None:
        self.engine.wait_for(lambda: bool(self.engine.aborted))

    def probes(self) -> tuple[int, int]:
        """What `/health` and `/ready` say."""
        health, ready = (httpx.get(self.url + path, timeout=60).status_code for path in ("/health", "/ready"))
        return health, ready

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=60)


class SkippingLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock a test may put forward."""

    _skipped = 0.0

    def time(self) -> float:
        return super().time() + self._skipped

    def skip(self, seconds: float) -> None:
        """Returns once what was due within the seconds has been done."""
        skipped = threading.Event()
        self.call_soon_threadsafe(self._skip, seconds, skipped)
        assert skipped.wait(60)

    def _skip(self, seconds: float, skipped: threading.Event) -> None:
        self._skipped += seconds
        self.call_later(0, skipped.set)


def open_door(
    keys: ApiKeys | None,
    sockets: SocketWriter | None = None,
    *,
    logs_requests: bool = False,
    on_end: tuple[OnEnd, ...] = (),
    front: FrontMetrics | None = None,
    tls: ssl.SSLContext | None = None,
    proxy: ProxySettings | None = None,
    http: HttpSettings | None = None,
) -> Iterator[Door]:
    engine = InMemoryEngine()
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    streams = Streams(engine, sockets)
    app = build_app(
        engine, streams, read_description(engine), keys, http or HttpSettings(), proxy=proxy or ProxySettings()
    )
    if logs_requests:
        on_end = (*on_end, log_request)
    if front is not None:
        front.know(app.routes)
        on_end = (*on_end, front.end_request)
    server = http_server(app, on_end=on_end, on_use=front.end_use if front is not None else None, tls=tls)
    scheme = "http" if tls is None else "https"

    async def serve() -> None:
        streams.attach(asyncio.get_running_loop())
        comments = asyncio.create_task(streams.hold_lines())
        await server.serve(sockets=[listener])
        comments.cancel()

    loop = SkippingLoop()

    def run() -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(serve())

    thread = threading.Thread(target=run)
    thread.start()
    yield Door(f"{scheme}://127.0.0.1:{port}", engine, port, loop)
    server.should_exit = True
    thread.join()
    engine.close()


class Asking(threading.Thread):
    """A request in a thread of its own; `answer` waits for the whole of it."""

    def __init__(self, door: Door, path: str = CHAT, client: httpx.Client | None = None, **fields: object) -> None:
        super().__init__()
        self._url, self._client, self._body = door.url + path, client or httpx.Client(timeout=60), BODY | fields
        self.start()

    def run(self) -> None:
        self._response = self._client.post(self._url, json=self._body, timeout=60)

    def answer(self) -> httpx.Response:
        self.join()
        return self._response


def raw_chat(body: bytes | None = None) -> bytes:
    body = json.dumps(BODY | {"stream": True}).encode() if body is None else body
    head = (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    )
    return head % len(body) + body
