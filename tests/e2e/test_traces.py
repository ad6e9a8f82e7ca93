"""`--otlp-traces-endpoint` on a running server."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from plait_testing.collector import attributes, collector
from plait_testing.running_server import StartServer

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


@pytest.mark.parametrize("url", ["grpc://127.0.0.1:4317", "nowhere"])
def test_a_bad_endpoint_ends_the_start(check_models: Path, server: StartServer, url: str) -> None:
    refused = server(check_models / "recall-gqa", "--otlp-traces-endpoint", url)
    assert refused.wait() == 2
    assert "--otlp-traces-endpoint is" in refused.last_line
