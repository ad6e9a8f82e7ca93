"""How an answer is read from its bytes: whatever their cuts, every token with the time of its arrival."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plait.bench.connection import Connection, Exchange
from plait.bench.messages import Counting, Go, Job, Outcome, Setup
from plait.bench.response import Response

STREAM = (
    b': a comment\n\ndata: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'
    b'data: {"choices":[{"index":0,"delta":{"content":"Gr\xc3\xbc"}}],"usage":null}\n\n'
    b'event: message\ndata:{"choices":[{"index":0,"delta":{"content":"data: [DONE]\\n\\n"}}]}\r\n\r\n'
    b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"length"}]}\n\n'
    b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":5}}\n\ndata: [DONE]\n\n'
)
TOKEN = b'data: {"choices":[{"text":"a"}]}\n\n'
DONE = b"data: [DONE]\n\n"


def read(*pieces: bytes, counting: Counting = "usage", streamed: bool = True, status: int = 200) -> Response:
    """An answer whose pieces arrive at 1, 2, 3 ..."""
    answer = Response(streamed, counting)
    answer.status = status
    for now, piece in enumerate(pieces, 1):
        answer.feed(float(now), piece)
    answer.finish()
    return answer


@settings(deadline=None)
@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_cuts_anywhere_change_nothing(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(STREAM)]
    answer = read(*(STREAM[start:end] for start, end in pairwise(edges)))
    assert answer.failure is None, answer.detail
    assert list(answer.counts) == [1, 1]
    assert answer.finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (9, 5)


def test_a_token_has_the_time_at_which_its_event_was_whole() -> None:
    event = b'data: {"choices":[{"text":"a"}]}\n\n'
    answer = read(event + event[:9], event[9:], event * 2, b"data: [DONE]\n\n")
    assert list(answer.times) == [1, 2, 3, 3]


def test_token_ids_say_how_many_tokens_a_chunk_brings() -> None:
    answer = read(
        b'data: {"choices":[{"text":"abc","token_ids":[1,2,3]}]}\n\n'
        b'data: {"choices":[{"text":"","token_ids":[4]}]}\n\n',
        b'data: {"choices":[{"text":"","token_ids":[]}]}\n\ndata: [DONE]\n\n',
        counting="token-ids",
    )
    assert list(answer.counts) == [3, 1]


def test_a_running_usage_says_how_many_tokens_a_chunk_brings() -> None:
    event = b'data: {"choices":[{"text":"ab"}],"usage":{"completion_tokens":%d}}\n\n'
    answer = read(event % 2, event % 3, event % 3, event % 7, b"data: [DONE]\n\n", counting="running-usage")
    assert list(zip(answer.times, answer.counts, strict=True)) == [(1, 2), (2, 1), (4, 4)]


def test_reasoning_is_an_answer_too() -> None:
    answer = read(b'data: {"choices":[{"delta":{"reasoning_content":"hm"}}]}\n\n', b"data: [DONE]\n\n")
    assert list(answer.times) == [1]


def test_a_whole_answer_arrives_with_its_last_byte() -> None:
    body = b'{"choices":[{"text":"abc","finish_reason":"stop"}],"usage":{"prompt_tokens":3,"completion_tokens":2}}'
    answer = read(body[:20], body[20:], streamed=False)
    assert list(answer.times) == [2]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 2


@pytest.mark.parametrize(
    ("pieces", "status", "failure", "detail"),
    [
        ([b'{"error":{"message":"the queue is full"}}'], 429, "http 429", "the queue is full"),
        ([b"<html>busy"], 503, "http 503", "<html>busy"),
        ([b'data: {"error":{"message":"lost"}}\n\n'], 200, "error event", "lost"),
        ([b'data: {"choices":[{"text":"a"}]}\n\n', b'data: {"error":"lost"}\n\n'], 200, "error event", "lost"),
        ([TOKEN, b'data: {"object":"error","message":"lost"}\n\n', DONE], 200, "error event", "lost"),
        ([b'{"object":"error","message":"the queue is full"}'], 429, "http 429", "the queue is full"),
        ([DONE], 200, "no answer", "200 without a token"),
        ([b"data: {}\n\n", DONE], 200, "no answer", "200 without a token"),
        ([b'data: {"choices":[{"text":"a"}]}\n\n'], 200, "closed before its end", "without a finish_reason"),
        ([b"<html>hello</html>"], 200, "no OpenAI answer", "<html>hello"),
        ([b"<html>\n<body>\n"], 200, "no OpenAI answer", "<html>"),
        ([b"data: {nonsense\n\n"], 200, "no OpenAI answer", "nonsense"),
        ([b'data: {"a":' + b"[" * 100_000 + b"\n\n"], 200, "no OpenAI answer", "[[["),
        ([b'{"a":' + b"[" * 100_000], 500, "http 500", "[[["),
        ([b""], 200, "no OpenAI answer", "no event"),
    ],
)
def test_what_is_no_answer_fails_by_its_kind(pieces: list[bytes], status: int, failure: str, detail: str) -> None:
    answer = read(*pieces, status=status)
    assert answer.failure == failure
    assert detail in answer.detail


def test_an_answer_may_be_empty_where_its_end_has_a_reason() -> None:
    assert read(b'data: {"choices":[{"text":"","finish_reason":"stop"}]}\n\n', DONE).failure is None


@pytest.mark.parametrize("body", [b'{"detail":"x"}', b'{"choices":[],"usage":{"completion_tokens":5}}'])
def test_a_whole_answer_needs_choices(body: bytes) -> None:
    answer = read(body, streamed=False)
    assert (answer.failure, "a body without choices" in answer.detail) == ("no OpenAI answer", True)


def test_a_whole_chat_answer_is_read() -> None:
    answer = read(b'{"choices":[{"message":{"content":"abc"}}]}', streamed=False)
    assert (answer.failure, list(answer.counts)) == (None, [1])


def test_a_whole_answer_needs_a_token_or_a_reason() -> None:
    assert read(b'{"choices":[{"text":""}]}', streamed=False).failure == "no answer"


def test_an_event_may_have_several_lines_of_data() -> None:
    answer = read(b'data: {"choices":\r\ndata: [{"te', b'xt":"a"}]}\r\n\r\n', b'data:{"choices":\ndata:[{"text":"b"}]}')
    assert answer.failure == "closed before its end"
    assert list(answer.times) == [2, 3]


def test_data_without_content_are_no_event() -> None:
    answer = read(b'data:\n\ndata: \r\n\r\ndata: {"choices":[{"text":"a"}]}\n\ndata: [DONE]\n\n')
    assert answer.failure is None
    assert list(answer.times) == [1]


def test_a_body_that_never_ends_is_not_kept() -> None:
    answer = Response(True, "usage")
    answer.status = 200
    for _ in range(40):
        answer.feed(1.0, bytes(1 << 20))
    assert answer.failure == "no OpenAI answer"
    assert "over 33554432 bytes" in answer.detail


async def answered(reply: bytes) -> Outcome:
    """What becomes of a request that a server answers with `reply`, and then closes the connection."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(reply)
        writer.close()

    ended: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    address, port = server.sockets[0].getsockname()
    setup = Setup(address, port, None, b"POST / HTTP/1.1\r\nContent-Length: ", True, "usage", 1.0)
    _, connection = await asyncio.get_running_loop().create_connection(
        lambda: Connection(setup.head, lambda _, exchange, __: ended.set_result(exchange.outcome())), address, port
    )
    connection.send(Exchange(setup, Job(0, b""), Go(0, None, None)))
    outcome = await asyncio.wait_for(ended, 60)
    server.close()
    return outcome


@pytest.mark.parametrize(
    ("reply", "failure"),
    [
        pytest.param(b"HTTP/1.0 200 OK\r\n\r\n" + STREAM, None, id="whole"),
        pytest.param(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n\r\n" + STREAM, None, id="after an interim"),
        pytest.param(
            b"HTTP/1.0 200 OK\r\n\r\n" + STREAM[: STREAM.index(b"event")], "closed before its end", id="without its end"
        ),
        pytest.param(b"HTTP/1.0 503 Busy\r\n\r\nbusy", "http 503", id="an error"),
        pytest.param(b"HTTP/1.1 503 Busy\r\nContent-Length: 9\r\n\r\nbusy", "closed before its end", id="cut short"),
        pytest.param(b"HTTP/1.1 100 Continue\r\n\r\n", "closed before its end", id="an interim alone"),
    ],
)
def test_an_answer_without_a_length_ends_with_its_connection(reply: bytes, failure: str | None) -> None:
    assert asyncio.run(answered(reply)).failure == failure
