"""Carries TCP connections between this machine's loopback and that of the clients' network namespace."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from plait_testing.mini_kubelet import enter_network
from plait_testing.node_network import NodeNetwork
from plait_testing.service_network import CLIENTS

_LOOPBACK = "127.0.0.1"


@contextlib.contextmanager
def into_clients(network: NodeNetwork, port: int) -> Iterator[None]:
    """A port of this machine's loopback is one of the clients' loopback too."""
    with ThreadPoolExecutor(1) as here, _clients(network) as clients:
        yield from _relay(listener=clients, connector=here, port=port)


@contextlib.contextmanager
def out_of_clients(network: NodeNetwork, port: int) -> Iterator[None]:
    """A port of the clients' loopback is one of this machine's too."""
    with ThreadPoolExecutor(1) as here, _clients(network) as clients:
        yield from _relay(listener=here, connector=clients, port=port)


def _clients(network: NodeNetwork) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, initializer=enter_network, initargs=(network, CLIENTS))


def _relay(listener: ThreadPoolExecutor, connector: ThreadPoolExecutor, port: int) -> Iterator[None]:
    """A socket belongs to the namespace of the thread that opens it, whoever uses it."""
    door = listener.submit(socket.create_server, (_LOOPBACK, port)).result()
    started: Future[Callable[[], object]] = Future()
    served = connector.submit(lambda: asyncio.run(_serve(door, port, started)))
    stop = started.result()
    try:
        yield
    finally:
        stop()
        served.result()


async def _serve(door: socket.socket, port: int, started: Future[Callable[[], object]]) -> None:
    """Until what `started` gets is called."""

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # Nobody may listen yet; and asyncio takes the cancellation at the end for a failure.
        with contextlib.closing(writer), contextlib.suppress(ConnectionError, asyncio.CancelledError):
            from_there, to_there = await asyncio.open_connection(_LOOPBACK, port)
            await asyncio.gather(_copy(reader, to_there), _copy(from_there, writer), return_exceptions=True)

    asked_to_end, loop = asyncio.Event(), asyncio.get_running_loop()
    server = await asyncio.start_server(carry, sock=door)
    started.set_result(lambda: loop.call_soon_threadsafe(asked_to_end.set))
    await asked_to_end.wait()
    server.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.closing(writer):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
