"""An OpenTelemetry collector in this process: it takes OTLP over HTTP and keeps the spans."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span

WAIT_SECONDS = 60.0


@dataclass
class Collector:
    """What was sent, and how it answers."""

    url: str = ""
    status: int = 200
    spans: list[Span] = field(default_factory=list)
    """Those that it took."""
    num_refused: int = 0
    """Batches."""
    changed: threading.Condition = field(default_factory=threading.Condition)

    def wait_for(self, num_spans: int = 0, num_refused: int = 0) -> list[Span]:
        """The spans, once there are so many, and so many batches were refused."""
        with self.changed:
            assert self.changed.wait_for(
                lambda: len(self.spans) >= num_spans and self.num_refused >= num_refused, WAIT_SECONDS
            )
            return list(self.spans)

    def take(self, path: str, body: bytes) -> None:
        with self.changed:
            if self.status != 200 or path != "/v1/traces":
                self.num_refused += 1
            else:
                asked = ExportTraceServiceRequest.FromString(body)
                self.spans += [
                    span for resource in asked.resource_spans for scope in resource.scope_spans for span in scope.spans
                ]
            self.changed.notify_all()


@contextmanager
def collector() -> Iterator[Collector]:
    """A running one."""
    taken = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            self.send_response(taken.status)
            self.send_header("content-length", "0")
            self.end_headers()
            taken.take(self.path, body)

        def log_message(self, *_: object) -> None:
            """Nobody reads it."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        taken.url = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield taken
        server.shutdown()


def attributes(span: Span) -> dict[str, object]:
    return {pair.key: _value(pair.value) for pair in span.attributes}


def _value(value: AnyValue) -> object:
    kind = value.WhichOneof("value")
    assert kind is not None
    if kind == "array_value":
        return [_value(one) for one in value.array_value.values]
    found: object = getattr(value, kind)
    return found
