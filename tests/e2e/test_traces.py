"""`--otlp-traces-endpoint` on a running server."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from bench.http.traces import measure, parse
from plait_testing.collector import attributes, collector
from plait_testing.metrics import read_metrics
from plait_testing.running_server import Server, StartServer
from plait_testing.slow_steps import SlowSteps

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def test_a_collector_gets_each_request_with_its_parent_and_times(check_models: Path, server: StartServer) -> None:
    with collector() as taken:
        running = server(
            check_models / "recall-gqa", "--threads", "1", "--dp", "2", "--otlp-traces-endpoint", taken.url
        )
        asked = {"model": "recall-gqa", "prompt": "count 1 9", "n": 2, "max_tokens": 4, "ignore_eos": True}
        for stream in (False, True):
            head = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": f"traced-{stream}"}
            httpx.post(running.url + "/v1/completions", json=asked | {"stream": stream}, headers=head, timeout=60)
        running.stop()
        spans = taken.wait_for(2)
    assert {span.trace_id.hex() for span in spans} == {TRACE}
    assert {span.parent_span_id.hex() for span in spans} == {PARENT}
    assert {attributes(span)["plait.request.id"] for span in spans} == {"traced-False", "traced-True"}
    for span in spans:
        assert [event.name for event in span.events] == ["queued", "first_row", "first_token", "end"]
        times = [span.start_time_unix_nano, *(event.time_unix_nano for event in span.events), span.end_time_unix_nano]
        assert times == sorted(times)
        assert attributes(span)["gen_ai.usage.output_tokens"] == 8
        assert "count 1 9" not in str(span)


def test_the_span_of_a_preempted_request_says_so(
    check_models: Path, server: StartServer, slow_steps: SlowSteps
) -> None:
    """Two requests fit into the pool until they have both grown; the later one then gives its pages to the other."""
    pool = ("--page-size=16", "--num-pages=12", "--watermark=0", "--no-prefix-cache")
    asked = {"prompt": "count 1 9", "max_tokens": 150, "ignore_eos": True, "temperature": 0}

    with collector() as taken, ThreadPoolExecutor() as threads:
        running = server(
            check_models / "recall-gqa", "--threads=1", "--dtype=float32", f"--otlp-traces-endpoint={taken.url}", *pool
        )

        def ask(request_id: str) -> httpx.Response:
            url, head = running.url + "/v1/completions", {"x-request-id": request_id}
            return httpx.post(url, json=asked, headers=head, timeout=60)

        with slow_steps.within():
            answers = []
            for number, request_id in enumerate(("first", "second"), start=1):
                answers.append(threads.submit(ask, request_id))
                wait_for_running(running, number)
        texts = [answer.result().json()["choices"][0]["text"] for answer in answers]
        preemptions = read_metrics(running.url)["plait_preemptions_total"]
        running.stop()
        spans = {attributes(span)["plait.request.id"]: span for span in taken.wait_for(2)}
    names = {request: [event.name for event in span.events] for request, span in spans.items()}
    whole = ["queued", "first_row", "first_token", "end"]
    assert preemptions >= 1
    assert names["first"] == whole
    assert names["second"] == [*whole[:3], *["preempted"] * int(preemptions), "end"]
    times = [event.time_unix_nano for event in spans["second"].events]
    assert times == sorted(times)
    assert texts[0] == texts[1]


def test_the_bench_of_traces_counts_every_request_and_span() -> None:
    """At a size at which its times mean nothing."""
    rows = list(measure(parse(["--streams=4", "--output-len=8", "--requests=8", "--rounds=1"])))
    values = {(row.case, row.metric): row.value for row in rows}
    assert values["traces on", "spans_lost"] == 0
    for traces in ("on", "off"):
        assert values[f"traces {traces}, 4 streams of 8 tokens", "tokens_per_second"] > 0
        assert values[f"traces {traces}, requests of one token, 4 at a time", "requests_per_second"] > 0


def wait_for_running(server: Server, number: int) -> None:
    deadline = time.monotonic() + 60
    while read_metrics(server.url)["plait_requests_running"] < number:
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("url", ["grpc://127.0.0.1:4317", "nowhere"])
def test_a_bad_endpoint_ends_the_start(check_models: Path, server: StartServer, url: str) -> None:
    refused = server(check_models / "recall-gqa", "--otlp-traces-endpoint", url)
    assert refused.wait() == 2
    assert "--otlp-traces-endpoint is" in refused.last_line
