"""Spans of requests, as a collector takes them."""

from __future__ import annotations

import socket
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import httpx
import pytest
from plait.errors import SettingsError
from plait.http.trace_endpoint import check_endpoint, open_traces
from plait.http.traces import Traces
from plait.trace_settings import TraceSettings
from plait_testing.collector import Collector, attributes, collector
from plait_testing.front_door import CHAT, Asking, Door, open_door
from plait_testing.in_memory_engine import record

LAST, USED = 1, 16
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@dataclass
class Traced:
    door: Door
    collector: Collector

    def ask(self, used: bytes, **headers: str) -> httpx.Response:
        """Ask for a chat; the engine says it took this."""
        num_before = len(self.door.engine.submitted)
        asking = Asking(self.door, client=httpx.Client(timeout=60, headers=headers))
        stream = self.door.wait_for(num_before + 1)
        self.door.engine.send(record(stream, b'{"ok":1}', LAST), record(stream, used, USED))
        return asking.answer()


@pytest.fixture
def traced() -> Iterator[Traced]:
    with collector() as taken:
        traces = Traces(check_endpoint(taken.url), delay_seconds=0.01)
        for door in open_door(None, on_end=(traces.end_request,)):
            yield Traced(door, taken)
        traces.close()


def used(*times: tuple[int, int]) -> bytes:
    return struct.pack("<QQB", 70, 5, 1) + b"".join(struct.pack("<BQ", *time) for time in times)


def test_a_span_has_the_parent_that_was_sent_and_the_engines_times(traced: Traced) -> None:
    times = used((0, 100), (1, 250), (2, 300), (3, 900))
    answer = traced.ask(times, traceparent=f"00-{TRACE}-{PARENT}-01", tracestate="a=b")
    [span] = traced.collector.wait_for(1)
    assert (span.trace_id.hex(), span.parent_span_id.hex(), span.trace_state) == (TRACE, PARENT, "a=b")
    assert span.name == "chat tiny"
    assert [event.name for event in span.events] == ["queued", "first_row", "first_token", "preempted", "end"]
    queued, *others = (event.time_unix_nano for event in span.events)
    assert [time - queued for time in others] == [100_000, 250_000, 300_000, 900_000]
    assert span.start_time_unix_nano <= queued
    said = attributes(span)
    assert said["plait.request.id"] == answer.headers["x-request-id"]
    assert (said["gen_ai.operation.name"], said["gen_ai.request.model"]) == ("chat", "tiny")
    assert (said["gen_ai.usage.input_tokens"], said["gen_ai.usage.output_tokens"]) == (70, 5)
    assert (said["gen_ai.response.finish_reasons"], said["http.response.status_code"]) == (["length"], 200)
    assert "error.type" not in said


def test_a_broken_or_absent_parent_begins_a_trace(traced: Traced) -> None:
    for headers in ({}, {"traceparent": "00-rubbish-01"}, {"traceparent": f"00-{'0' * 32}-{PARENT}-01"}):
        traced.ask(used(), **headers)
    spans = traced.collector.wait_for(3)
    assert {span.parent_span_id for span in spans} == {b""}
    assert len({span.trace_id for span in spans}) == 3


def test_a_parent_that_is_not_sampled_has_no_span_and_what_the_engine_never_got_neither(traced: Traced) -> None:
    traced.ask(used(), traceparent=f"00-{TRACE}-{PARENT}-00")
    assert httpx.get(traced.door.url + "/health", timeout=60).status_code == 200
    assert httpx.post(traced.door.url + CHAT, content=b"{", timeout=60).status_code == 400
    traced.ask(used(), traceparent=f"00-{'1' * 32}-{PARENT}-01")
    assert [span.trace_id.hex() for span in traced.collector.wait_for(1)] == ["1" * 32]


def test_a_client_that_leaves_has_a_span_that_says_so(traced: Traced) -> None:
    with socket.create_connection(("127.0.0.1", traced.door.port)) as connection:
        body = b'{"model":"tiny","messages":[{"role":"user","content":"a"}]}'
        head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
        connection.sendall(head.encode() + b"\r\n\r\n" + body)
        stream = traced.door.wait_for(1)
    traced.door.wait_for_abort()
    traced.door.engine.send(record(stream, struct.pack("<QQB", 70, 5, 2), USED))
    traced.door.loop.skip(5)
    [span] = traced.collector.wait_for(1)
    said = attributes(span)
    assert (said["error.type"], said["gen_ai.usage.output_tokens"]) == ("client_left", 5)


def test_lost_spans_are_told_once_and_that_they_arrive_again(traced: Traced, capfd: pytest.CaptureFixture[str]) -> None:
    traced.collector.status = 400
    for number in (1, 2):
        assert traced.ask(used()).status_code == 200
        traced.collector.wait_for(num_refused=number)
    traced.collector.status = 200
    traced.ask(used())
    assert len(traced.collector.wait_for(1)) == 1
    traced.ask(used())
    traced.collector.wait_for(2)
    said = [line for line in capfd.readouterr().err.splitlines() if "spans" in line]
    assert len(said) == 2
    assert f"WARNING traces: {traced.collector.url}/v1/traces does not take spans" in said[0]
    assert f"INFO traces: {traced.collector.url}/v1/traces takes spans again; 2 or more were lost" in said[1]


def test_a_collector_that_is_away_holds_no_request_and_no_end_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections, and says nothing
        traces = Traces(f"http://127.0.0.1:{silent.getsockname()[1]}/v1/traces", delay_seconds=0.01)
        for door in open_door(None, on_end=(traces.end_request,)):
            with collector() as unused:
                for _ in range(3):
                    assert Traced(door, unused).ask(used()).status_code == 200
        traces.close()


@pytest.mark.parametrize(
    "url",
    [
        *("127.0.0.1:4318", "grpc://127.0.0.1:4317", "http://", "http://a:70000/v1/traces", "http://a:x", ""),
        *("http://user:secret@a/v1/traces", "http://a/v1/traces?b=c", "http://a b/", "file:///a", "http://[::1"),
    ],
)
def test_an_endpoint_that_is_no_url_is_refused(url: str) -> None:
    said = r"--otlp-traces-endpoint is .* such as http://127\.0\.0\.1:4318/v1/traces"
    with pytest.raises(SettingsError, match=said) as refused:
        check_endpoint(url)
    assert "secret" not in str(refused.value)


def test_an_endpoint_without_a_path_gets_the_usual_one() -> None:
    assert check_endpoint("http://a:4318") == check_endpoint("http://a:4318/") == "http://a:4318/v1/traces"
    assert check_endpoint("https://[::1]:4318/other") == "https://[::1]:4318/other"


def test_without_the_extra_the_start_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "plait.http.traces")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.resources", None)
    with pytest.raises(SettingsError, match=r"opentelemetry.* is not installed; pip install 'plait\[traces\]'"):
        open_traces(TraceSettings(otlp_traces_endpoint="http://127.0.0.1:4318"))
    assert open_traces(TraceSettings()) is None
