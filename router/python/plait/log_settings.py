"""Settings of what is told about requests."""

from __future__ import annotations

from typing import Annotated

import msgspec

from plait.setting import Setting


class LogSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Log."""

    enable_log_requests: Annotated[
        bool,
        Setting(
            "write a line for each request that ends, with its X-Request-Id, never its prompt; needs --log-level info "
            "or debug"
        ),
    ] = False
    log_json: Annotated[
        bool,
        Setting(
            "write each line on standard error as a JSON object with time, level, source and message, and request_id "
            "where there is one; standard output stays text"
        ),
    ] = False
