"""From the engine's packed records to each client's bytes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plait.http.streams import COMMENT, MAX_BACKLOG_BYTES, Data, Failure, Gone, Streams, Used, parse_records
from plait_testing.in_memory_engine import LAST, TOO_SLOW, InMemoryEngine, failure, record


@pytest.fixture
def engine() -> Iterator[InMemoryEngine]:
    made = InMemoryEngine()
    yield made
    made.close()


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2**64 - 1), st.binary(max_size=40), st.booleans()), max_size=10))
def test_packed_records_come_apart_as_they_were_put_together(records: list[tuple[int, bytes, bool]]) -> None:
    packed = b"".join(record(stream, payload, LAST * last) for stream, payload, last in records)
    found = [(one.stream, one.part) for one in parse_records(packed)]
    assert found == [(stream, Data(payload, last)) for stream, payload, last in records]


def test_an_error_record_carries_status_advice_and_body() -> None:
    (one,) = parse_records(failure(3, 429, b'{"error":{}}', retry_after_seconds=2))
    assert one.part == Failure(429, 2, b'{"error":{}}')


def test_one_wake_up_serves_all_streams_and_joins_what_is_one_streams(engine: InMemoryEngine) -> None:
    async def story() -> None:
        loop = asyncio.get_running_loop()
        streams = Streams(engine)
        streams.attach(loop)
        one, two = streams.open(b'{"x":1}'), streams.open(b'{"x":2}')
        assert engine.submitted == {one.id: {"x": 1}, two.id: {"x": 2}}
        engine.send(record(one.id, b"a"), record(two.id, b"A"), record(one.id, b"b"))
        assert await one.next() == Data(b"ab", False)
        assert await two.next() == Data(b"A", False)
        assert engine.num_takes == 1
        engine.send(record(one.id, b"c", LAST))
        assert await one.next() == Data(b"c", True)
        assert len(streams) == 1
        streams.detach(loop)

    asyncio.run(story())


def test_a_stream_that_ended_is_not_aborted_and_one_that_did_not_is(engine: InMemoryEngine) -> None:
    streams = Streams(engine)
    ended, under_way = streams.open(b"{}"), streams.open(b"{}")
    engine.send(record(ended.id, b"x", LAST))
    streams.dispatch()
    ended.close()
    under_way.close()
    under_way.close()
    assert engine.aborted == [under_way.id]


def test_records_of_a_closed_stream_are_dropped(engine: InMemoryEngine) -> None:
    streams = Streams(engine)
    stream = streams.open(b"{}")
    stream.close()
    engine.send(record(stream.id, b"late", LAST), failure(99, 500, b"{}"))
    streams.dispatch()
    assert len(streams) == 0


def test_bytes_before_a_failure_are_read_before_it(engine: InMemoryEngine) -> None:
    async def story() -> None:
        streams = Streams(engine)
        stream = streams.open(b"{}")
        engine.send(record(stream.id, b"half"), failure(stream.id, 503, b"{}"))
        streams.dispatch()
        assert await stream.next() == Data(b"half", False)
        assert await stream.next() == Failure(503, 0, b"{}")

    asyncio.run(story())


def test_a_client_that_leaves_ends_the_wait(engine: InMemoryEngine) -> None:
    async def story() -> None:
        streams = Streams(engine)
        stream = streams.open(b"{}")
        asyncio.get_running_loop().call_soon(stream.leave)
        assert await stream.next() == Gone()

    asyncio.run(story())


def test_a_slow_reader_holds_a_bounded_backlog_and_is_then_cut_off(engine: InMemoryEngine) -> None:
    async def story() -> None:
        streams = Streams(engine)
        stream = streams.open(b"{}")
        chunk = b"x" * 65_536
        num_sent = 0
        while not engine.aborted:
            engine.send(record(stream.id, chunk))
            streams.dispatch()
            num_sent += 1
        assert num_sent * len(chunk) <= MAX_BACKLOG_BYTES + 2 * len(chunk)
        kept = await stream.next()
        assert isinstance(kept, Data)
        assert len(kept.payload) <= MAX_BACKLOG_BYTES + len(chunk)
        end = await stream.next()
        assert isinstance(end, Failure)
        assert b"read too slowly" in end.body

    asyncio.run(story())


def test_a_comment_goes_to_the_event_streams_that_have_begun_and_have_nothing_to_read(engine: InMemoryEngine) -> None:
    async def story() -> None:
        streams = Streams(engine)
        begun, busy, whole = streams.open(b"{}"), streams.open(b"{}"), streams.open(b"{}")
        begun.takes_comments = busy.takes_comments = True
        engine.send(record(busy.id, b"data: 1\n\n"), record(whole.id, b""))
        streams.dispatch()
        streams.comment()
        assert await begun.next() == Data(COMMENT, False)
        assert await busy.next() == Data(b"data: 1\n\n", False)
        assert await whole.next() == Data(b"", False)

    asyncio.run(story())


def test_a_server_that_is_to_write_no_comments_writes_none_when_asked_to_either(engine: InMemoryEngine) -> None:
    async def story() -> None:
        streams = Streams(engine, comment_seconds=None)
        stream = streams.open(b"{}")
        stream.takes_comments = True
        streams.comment()
        engine.send(record(stream.id, b"data: 1\n\n"))
        streams.dispatch()
        assert await stream.next() == Data(b"data: 1\n\n", False)

    asyncio.run(story())


def test_a_client_that_the_engine_finds_too_slow_reads_why(engine: InMemoryEngine) -> None:
    async def story() -> None:
        streams = Streams(engine)
        stream = streams.open(b"{}")
        engine.send(record(stream.id, b"", LAST | TOO_SLOW))
        streams.dispatch()
        end = await stream.next()
        assert isinstance(end, Failure)
        assert b"read too slowly" in end.body
        assert len(streams) == 0

    asyncio.run(story())


def used(stream: int, num_tokens: int, reason: int = 0) -> bytes:
    return record(stream, (1).to_bytes(8, "little") + num_tokens.to_bytes(8, "little") + bytes([reason]), 16)


def test_tokens_are_told_once_whether_a_stream_ends_fails_or_is_left() -> None:
    engine = InMemoryEngine()
    streams = Streams(engine)
    told: list[tuple[str, int, str]] = []
    names = ("ended", "failed", "left", "refused")

    def tell(name: str, used: Used) -> None:
        assert used.num_prompt_tokens == 1
        told.append((name, used.num_output_tokens, used.reason))

    ids = {name: streams.open(b"{}", on_used=partial(tell, name)) for name in names}
    ids["left"].close()
    engine.send(record(ids["ended"].id, b"{}", LAST), used(ids["ended"].id, 5), used(ids["ended"].id, 6))
    engine.send(used(ids["failed"].id, 3, 3), failure(ids["failed"].id, 500, b"{}"))
    engine.send(used(ids["left"].id, 2, 2), failure(ids["refused"].id, 429, b"{}"), used(ids["refused"].id, 9))
    streams.dispatch()
    assert told == [("ended", 5, "stop"), ("failed", 3, "error"), ("left", 2, "abort")]
    engine.close()
