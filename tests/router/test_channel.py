"""Messages between launchers: none that has come is left lying, whatever the receiver does at that moment."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from plait.nodes.channel import MAX_MESSAGE_BYTES, Connection, Dialler, Listener
from plait.nodes.key_files import read_keys, write_new_keys
from plait.nodes.member import lines_message
from plait.nodes.messages import encode

MOMENT = 0.2
"""Enough for a message on loopback; a slower machine only makes the test easier to pass."""


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    write_new_keys(tmp_path / "keys", 2)
    return tmp_path / "keys"


@pytest.mark.parametrize("receiver", ["head", "member"])
def test_a_message_that_comes_just_before_a_send_is_received(receiver: str, keys: Path) -> None:
    assert asyncio.run(asyncio.wait_for(exchange(receiver, keys), 20)) == [b"while busy", b"later"]


async def exchange(receiver: str, keys: Path) -> list[bytes]:
    """What the receiver gets of a peer that sends while the receiver is busy, and afterwards."""
    with (
        Listener(read_keys(keys, 0, 2), 0, "127.0.0.1", 0) as head,
        Dialler(read_keys(keys, 1, 2), 1, 0, "127.0.0.1", head.port) as member,
    ):
        member.send(b"here")
        _, connection, _ = await head.receive()

        async def receive() -> bytes:
            return (await head.receive())[2] if receiver == "head" else await member.receive()

        def send(content: bytes, *, by_receiver: bool) -> None:
            if by_receiver == (receiver == "head"):
                head.send(connection, content)
            else:
                member.send(content)

        receiving = asyncio.create_task(receive())
        await asyncio.sleep(MOMENT)
        send(b"while busy", by_receiver=False)
        time.sleep(MOMENT)  # the event loop is busy
        send(b"heartbeat", by_receiver=True)
        await asyncio.sleep(MOMENT)
        send(b"later", by_receiver=False)
        return [await receiving, await receive()]


def test_what_cannot_be_sent_is_dropped(keys: Path) -> None:
    async def send() -> None:
        with Listener(read_keys(keys, 0, 2), 0, "127.0.0.1", 0) as head:
            head.send(Connection(b"gone", 0), b"to a connection that is not there")

    asyncio.run(send())


def test_many_long_lines_of_one_moment_stay_below_the_size_that_ends_a_link() -> None:
    said = lines_message(["\0" * (1 << 16)] * 400)
    assert 0 < len(said.lines) < 400
    assert said.num_dropped == 400 - len(said.lines)
    assert len(encode(said)) < MAX_MESSAGE_BYTES


def test_many_short_lines_of_one_moment_are_counted() -> None:
    said = lines_message(["a"] * 501)
    assert (len(said.lines), said.num_dropped) == (500, 1)
