"""One OpenTelemetry span for each request that the engine served, made at its end from the engine's record of times.

Names are those of OpenTelemetry's semantic conventions for generative AI. This module needs the extra `traces`.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.types import Scope

from plait.http.answers import Answer
from plait.http.request_facts import RequestFacts
from plait.http.streams import Used
from plait.log import log
from plait.version import version

MAX_WAITING_SPANS = 2048
_MAX_BATCH_SPANS = 512
_EXPORT_SECONDS = 10.0
_END_SECONDS = 2.0
"""For the last spans when the server ends."""
_LATE_SECONDS = 1.0
"""How long the engine may take to tell of a request that its client has left."""
_OPERATIONS = {"/v1/completions": "text_completion", "/v1/embeddings": "embeddings"}
"""By path; all others are chats."""
_PARENT = TraceContextTextMapPropagator()
Attributes = dict[str, str | int | float | Sequence[str]]


class Traces:
    """Sends spans to a collector. One that is away loses spans and holds nothing up."""

    def __init__(self, endpoint: str, *, delay_seconds: float = 5.0) -> None:
        """`endpoint` is a URL that `check_endpoint` has taken; spans are sent together after the delay."""
        # Its own words come again with each batch; `_WarnsOnce` says it.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        exporter = _WarnsOnce(OTLPSpanExporter(endpoint, timeout=_EXPORT_SECONDS), endpoint)
        self._provider = TracerProvider(
            resource=Resource.create({"service.name": "plait", "service.version": version()}), shutdown_on_exit=False
        )
        self._provider.add_span_processor(
            BatchSpanProcessor(
                exporter,
                max_queue_size=MAX_WAITING_SPANS,
                max_export_batch_size=_MAX_BATCH_SPANS,
                schedule_delay_millis=max(1.0, 1e3 * delay_seconds),
            )
        )
        self._tracer = self._provider.get_tracer("plait", version())

    def end_request(self, scope: Scope, facts: RequestFacts, answer: Answer) -> None:
        """Make the span of a request whose answer has ended; none if it never came to the engine."""
        if facts.model is None:
            return
        if facts.used is None and not answer.is_whole:
            # Its client left, and the engine has not told of its end yet.
            asyncio.get_running_loop().call_later(_LATE_SECONDS, self._record, scope, facts, answer)
        else:
            self._record(scope, facts, answer)

    def close(self) -> None:
        """Send what is left, for a moment."""
        thread = threading.Thread(target=self._provider.shutdown, daemon=True)
        thread.start()
        thread.join(_END_SECONDS)

    def _record(self, scope: Scope, facts: RequestFacts, answer: Answer) -> None:
        operation = _OPERATIONS.get(scope["path"], "chat")
        span = self._tracer.start_span(
            f"{operation} {facts.model}",
            _PARENT.extract(_carrier(scope)),
            SpanKind.SERVER,
            _attributes(scope, facts, answer, operation),
            start_time=answer.began_ns,
        )
        span.add_event("queued", timestamp=facts.submitted_ns)
        for name, micros in facts.used.times if facts.used is not None else ():
            span.add_event(name, timestamp=facts.submitted_ns + 1000 * micros)
        if (error := _error(facts.used, answer)) is not None:
            span.set_attribute("error.type", error)
            span.set_status(Status(StatusCode.ERROR))
        span.end(answer.began_ns + round(1e9 * answer.seconds))


def _carrier(scope: Scope) -> dict[str, str]:
    names = (b"traceparent", b"tracestate")
    return {name.decode(): value.decode("latin-1") for name, value in scope["headers"] if name in names}


def _attributes(scope: Scope, facts: RequestFacts, answer: Answer, operation: str) -> Attributes:
    attributes: Attributes = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "plait",
        "gen_ai.request.model": facts.model or "",
        "gen_ai.request.stream": facts.is_streamed,
        "http.request.method": scope["method"],
        "url.path": scope["path"],
        "plait.request.id": answer.request.decode(),
    }
    if answer.status:
        attributes["http.response.status_code"] = answer.status
    if (used := facts.used) is not None:
        attributes |= {
            "gen_ai.usage.input_tokens": used.num_prompt_tokens,
            "gen_ai.usage.output_tokens": used.num_output_tokens,
            "gen_ai.response.finish_reasons": [used.reason],
        }
        first = next((micros for name, micros in used.times if name == "first_token"), None)
        if first is not None:
            seconds = (facts.submitted_ns - answer.began_ns) / 1e9 + first / 1e6
            attributes["gen_ai.response.time_to_first_chunk"] = seconds
    return attributes


def _error(used: Used | None, answer: Answer) -> str | None:
    """`error.type`, or None."""
    if answer.status >= 400:
        return str(answer.status)
    if used is not None and used.reason == "error":
        return "engine"
    return None if answer.is_whole else "client_left"


class _WarnsOnce(SpanExporter):
    """Says in the log when spans begin to be lost, and when they arrive again."""

    def __init__(self, exporter: SpanExporter, endpoint: str, say: Callable[..., None] = log) -> None:
        self._exporter = exporter
        self._endpoint = endpoint
        self._say = say
        self._num_lost = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        try:
            result = self._exporter.export(spans)
        except Exception:  # noqa: BLE001 (whatever it is, the spans are lost and requests go on)
            result = SpanExportResult.FAILURE
        if result is not SpanExportResult.SUCCESS:
            if self._num_lost == 0:
                where = f"{self._endpoint} does not take spans, which are lost until it does; requests go on"
                self._say("traces", where, "WARNING")
            self._num_lost += len(spans)
        elif self._num_lost > 0:
            self._say("traces", f"{self._endpoint} takes spans again; {self._num_lost} or more were lost")
            self._num_lost = 0
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._exporter.force_flush(timeout_millis)
