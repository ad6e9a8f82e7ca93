"""A TCP proxy that cuts lines on which nothing comes, as those in front of servers do."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import httpx


@dataclass
class IdleProxy:
    """One that runs."""

    url: str
    num_cut: int = 0


@contextlib.contextmanager
def idle_proxy(server: str, idle_seconds: float) -> Iterator[IdleProxy]:
    """In front of the server at this URL; it cuts a line once nothing has come for so long from either side."""
    proxy, started, asked_to_end = IdleProxy(""), threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()
    asked = httpx.URL(server)

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_there, to_there = await asyncio.open_connection(asked.host, asked.port)
        heard = asyncio.Event()
        both = [asyncio.create_task(_copy(*way, heard)) for way in ((reader, to_there), (from_there, writer))]
        try:
            while not any(way.done() for way in both):
                heard.clear()
                async with asyncio.timeout(idle_seconds):
                    await heard.wait()
        except TimeoutError:
            proxy.num_cut += 1
        finally:
            for way in both:
                way.cancel()
            writer.transport.abort()
            to_there.transport.abort()

    async def serve() -> None:
        listening = await asyncio.start_server(carry, "127.0.0.1", 0)
        proxy.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        started.set()
        async with listening:
            await asked_to_end.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    started.wait()
    try:
        yield proxy
    finally:
        loop.call_soon_threadsafe(asked_to_end.set)
        thread.join()
        loop.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, heard: asyncio.Event) -> None:
    """Until one side has ended."""
    with contextlib.suppress(ConnectionError):
        while piece := await reader.read(65_536):
            heard.set()
            writer.write(piece)
            await writer.drain()
    heard.set()
