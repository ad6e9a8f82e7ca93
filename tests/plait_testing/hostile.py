"""Requests that are sent to break a server, each over a connection of its own."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from typing import NamedTuple

CHAT = b"/v1/chat/completions"
BIG = 9 << 20
"""Bytes of a body: more than the server takes."""
NUM_TOOLS = 1_000_000
DEPTH = 100_000
SECONDS = 120.0
"""A request that is not over by then has hung."""


class Answered(NamedTuple):
    """What became of a hostile request."""

    kind: str
    status: int
    """0: none came."""
    head: bytes


class Attack(NamedTuple):
    """A kind of request."""

    kind: str
    send: Callable[[asyncio.StreamWriter], Awaitable[None]]
    statuses: frozenset[int]
    """What a server may answer; 0: nothing."""


def head(length: int, *lines: bytes, path: bytes = CHAT) -> bytes:
    own = [b"Content-Type: application/json", b"Content-Length: %d" % length] if length else []
    return b"\r\n".join([b"POST %b HTTP/1.1" % path, b"Host: plait", *own, *lines, b"", b""])


def whole(body: bytes) -> Callable[[asyncio.StreamWriter], Awaitable[None]]:
    """A request of this body."""

    async def send(writer: asyncio.StreamWriter) -> None:
        await _write(writer, head(len(body)) + body)

    return send


def chat(inner: bytes) -> bytes:
    return b'{"messages":[{"role":"user","content":"hi"}],' + inner + b"}"


async def one_large_header(writer: asyncio.StreamWriter) -> None:
    await _write(writer, head(2, b"X-Large: " + b"a" * 100_000))


async def many_headers(writer: asyncio.StreamWriter) -> None:
    await _write(writer, head(2, *(b"X-%d: a" % number for number in range(20_000))))


async def announced_body(writer: asyncio.StreamWriter) -> None:
    await _write(writer, head(1 << 40) + b"{")


async def chunked_body(writer: asyncio.StreamWriter) -> None:
    """It never says how long it is."""
    await _write(writer, head(0, b"Content-Type: application/json", b"Transfer-Encoding: chunked"))
    chunk = b"%x\r\n" % (1 << 18) + b" " * (1 << 18) + b"\r\n"
    for _ in range(BIG >> 18):
        await _write(writer, chunk)


async def half_a_head(writer: asyncio.StreamWriter) -> None:
    await _write(writer, head(10)[:40])
    writer.transport.abort()


async def half_a_body(writer: asyncio.StreamWriter) -> None:
    await _write(writer, head(1 << 20) + b'{"messages": [')
    writer.transport.abort()


async def byte_by_byte(writer: asyncio.StreamWriter) -> None:
    """One byte a second; it gives up after four."""
    for byte in head(10)[:4]:
        await _write(writer, bytes([byte]))
        await asyncio.sleep(1)
    writer.transport.abort()


async def body_byte_by_byte(writer: asyncio.StreamWriter) -> None:
    await _write(writer, head(1 << 10))
    for byte in b'{"me':
        await _write(writer, bytes([byte]))
        await asyncio.sleep(1)
    writer.transport.abort()


async def line_ends_in_an_id(writer: asyncio.StreamWriter) -> None:
    ids = (b"a\r\n Injected: 1", b"a\nInjected: 1", b"a\rInjected: 1", b"a%0d%0aInjected: 1", b"a\x00b")
    await _write(writer, head(2, b"X-Request-Id: " + random.choice(ids)) + b"{}")


REFUSED = frozenset([400])
TOO_LARGE = frozenset([413, 0])
"""The connection may be closed while the rest is still sent."""
GIVEN_UP = frozenset([0])
ATTACKS = (
    Attack("one large header", one_large_header, frozenset([431, 0])),
    Attack("many headers", many_headers, frozenset([431, 0])),
    Attack("announced body", announced_body, TOO_LARGE),
    Attack("chunked body", chunked_body, TOO_LARGE),
    Attack("half a head", half_a_head, GIVEN_UP),
    Attack("half a body", half_a_body, GIVEN_UP),
    Attack("byte by byte", byte_by_byte, GIVEN_UP),
    Attack("body byte by byte", body_byte_by_byte, GIVEN_UP),
    Attack("deep lists", whole(chat(b'"tools":' + b"[" * DEPTH + b"]" * DEPTH)), REFUSED),
    Attack("deep objects", whole(chat(b'"tools":[' + b'{"a":' * DEPTH + b"1" + b"}" * DEPTH + b"]")), REFUSED),
    Attack("bad UTF-8", whole(b'{"messages":[{"role":"user","content":"\xff\xfe\xc0\x80"}]}'), REFUSED),
    Attack("bad UTF-8 in a name", whole(chat(b'"\xff":1')), REFUSED),
    Attack("line ends in an id", line_ends_in_an_id, REFUSED),
    Attack("a million tools", whole(chat(b'"tools":[' + b",".join([b"{}"] * NUM_TOOLS) + b"]")), REFUSED),
)


async def attack(port: int, one: Attack) -> Answered:
    """Send it and read what comes."""
    async with asyncio.timeout(SECONDS):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        reading = asyncio.create_task(_read_head(reader))
        # The server may close it, perhaps with an answer.
        with suppress(ConnectionError):
            await one.send(writer)
        told = await reading
        writer.transport.abort()
    line = told.split(b" ", 2)
    return Answered(one.kind, int(line[1]) if len(line) > 1 else 0, told)


async def _write(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(data)
    await writer.drain()


async def _read_head(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.readuntil(b"\r\n\r\n")
    except (asyncio.IncompleteReadError, ConnectionError):
        return b""


async def attack_with_all(port: int, number: int, at_a_time: int) -> list[Answered]:
    """So many requests, of each kind in turn."""
    waiting = iter([ATTACKS[index % len(ATTACKS)] for index in range(number)])

    async def one_after_another() -> list[Answered]:
        return [await attack(port, one) for one in waiting]

    parts = await asyncio.gather(*(one_after_another() for _ in range(at_a_time)))
    return [each for part in parts for each in part]


def wrongly_answered(answers: list[Answered]) -> Iterator[Answered]:
    """Those that got what they must not get: another status, or a header that they wrote themselves."""
    allowed = {one.kind: one.statuses for one in ATTACKS}
    for each in answers:
        if each.status not in allowed[each.kind] or b"\ninjected" in each.head.lower():
            yield each
