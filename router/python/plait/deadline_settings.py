"""Settings of how long a request may take."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from plait.setting import Setting

Seconds = Annotated[float, Meta(ge=0.05, le=1e6)]


class DeadlineSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Deadlines of requests."""

    request_timeout_seconds: Annotated[
        Seconds | None,
        Setting("longest time in s from a request's arrival to its end; then it gets 504", unset="no limit"),
    ] = None
    first_token_timeout_seconds: Annotated[
        Seconds | None,
        Setting("longest time in s from a request's arrival to its first token; then it gets 504", unset="no limit"),
    ] = None
    idle_timeout_seconds: Annotated[
        Seconds | None,
        Setting("longest time in s between two tokens of a request; then its stream ends with 504", unset="no limit"),
    ] = None
