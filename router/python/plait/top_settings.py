"""Settings of `plait top`."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from plait.setting import Setting


class WatchSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Watching."""

    url: Annotated[str, Setting("address of the server, or of its admin listener")] = "http://127.0.0.1:8000"
    api_key_file: Annotated[str | None, Setting("file with the key to send; its first line counts", unset="no key")] = (
        None
    )
    interval: Annotated[Annotated[float, Meta(ge=0.1, le=3600)], Setting("time in s from one look to the next")] = 1.0
    count: Annotated[
        Annotated[int, Meta(ge=1, le=1_000_000_000)] | None, Setting("looks, then it ends", unset="until Ctrl-C")
    ] = None


class TopSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of `plait top`."""

    watch: WatchSettings = WatchSettings()
