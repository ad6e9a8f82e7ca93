"""Settings of traces."""

from __future__ import annotations

from typing import Annotated

import msgspec

from plait.setting import Setting


class TraceSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Traces."""

    otlp_traces_endpoint: Annotated[
        str | None,
        Setting(
            "URL of an OpenTelemetry collector that takes OTLP over HTTP, such as http://127.0.0.1:4318/v1/traces: it "
            "gets a span for each request, never its prompt; needs `pip install 'plait[traces]'`",
            unset="no traces",
        ),
    ] = None
