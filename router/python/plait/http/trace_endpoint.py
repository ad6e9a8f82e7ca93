"""Where traces go: checked at start, before anything is loaded."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from plait.errors import SettingsError
from plait.trace_settings import TraceSettings

if TYPE_CHECKING:
    from plait.http.traces import Traces

_FLAG = "--otlp-traces-endpoint"
_PATH = "/v1/traces"


def open_traces(settings: TraceSettings) -> Traces | None:
    """What sends spans; None if none are asked for. Raises `SettingsError`."""
    if settings.otlp_traces_endpoint is None:
        return None
    endpoint = check_endpoint(settings.otlp_traces_endpoint)
    try:
        from plait.http.traces import Traces
    except ImportError as error:
        raise SettingsError(
            f"{_FLAG} needs OpenTelemetry, of which {error.name} is not installed; pip install 'plait[traces]', or "
            f"leave {_FLAG} out"
        ) from error
    return Traces(endpoint)


def check_endpoint(url: str) -> str:
    """The URL, with the usual path if it has none. Raises `SettingsError` if spans cannot be sent there."""
    shown = re.sub("//[^/]*@", "//...@", url)  # a password stays out of the log
    refused = SettingsError(
        f"{_FLAG} is {shown!r}; give the URL at which a collector takes OTLP over HTTP, such as "
        f"http://127.0.0.1:4318{_PATH} (its port for gRPC, usually 4317, speaks another protocol)"
    )
    try:
        parts = urlsplit(url)
        has_port = parts.port is None or parts.port > 0
    except ValueError:
        raise refused from None
    if parts.scheme not in ("http", "https") or not parts.hostname or not has_port:
        raise refused
    if "@" in parts.netloc or parts.query or parts.fragment or any(character.isspace() for character in url):
        raise refused
    return parts._replace(path=parts.path if parts.path.strip("/") else _PATH).geturl()
