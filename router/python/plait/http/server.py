"""uvicorn with our connection limits and signals, and without its logs."""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, cast

import uvicorn
from fastapi import FastAPI

from plait.http.connection_limits import KEEP_ALIVE_SECONDS, BoundedHttp
from plait.http.request_facts import OnUse
from plait.http.request_log import Identified, OnEnd

if TYPE_CHECKING:
    from uvicorn._types import ASGIApplication

CLOSE_SECONDS = 5
"""For clients to read the end of their streams when the server stops."""


class HttpServer(uvicorn.Server):
    """uvicorn that leaves signals to its caller."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def http_server(
    app: FastAPI,
    *,
    on_end: Sequence[OnEnd] = (),
    on_use: OnUse | None = None,
    tls: ssl.SSLContext | None = None,
) -> HttpServer:
    """The server of `app`, over HTTPS with `tls`; who is told of its answers is as for `Identified`.

    Give `serve` a listening socket; set `should_exit` to end it.
    """
    config = uvicorn.Config(
        cast("ASGIApplication", Identified(app, on_end, on_use)),
        http=BoundedHttp,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="error",  # its warnings are written by clients: rubbish on the socket, upgrades
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=CLOSE_SECONDS,
    )
    config.load()
    config.ssl = tls
    return HttpServer(config)
