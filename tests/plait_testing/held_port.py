"""A port that is still free when a server gets round to it."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def held_port() -> Iterator[int]:
    """A port of 127.0.0.1 that the system gives to nobody else until the end of the block.

    A socket is bound to it and does not listen. A server that binds with SO_REUSEADDR or SO_REUSEPORT, as ZeroMQ and Go
    do, may listen there; one that asks for any port, and a connection's own end, get another.
    """
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind(("127.0.0.1", 0))
        port: int = held.getsockname()[1]
        yield port
