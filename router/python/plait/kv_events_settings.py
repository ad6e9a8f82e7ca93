"""Settings of KV events."""

from __future__ import annotations

from typing import Annotated

import msgspec

from plait.setting import Setting


class KvEventsSettings(msgspec.Struct, frozen=True, kw_only=True):
    """KV events."""

    kv_events_endpoint: Annotated[
        str | None,
        Setting(
            "ZeroMQ address at which to publish which pages are cached: tcp://127.0.0.1:PORT or ipc://PATH",
            unset="nothing is published",
        ),
    ] = None
    kv_events_replay_endpoint: Annotated[
        str | None, Setting("ZeroMQ address at which listeners ask for all cached pages", unset="none")
    ] = None
    kv_events_topic: Annotated[str, Setting("first frame of each message with KV events")] = ""
    kv_events_public: Annotated[
        bool,
        Setting("let the addresses of KV events be ones that others reach, who can then read every prompt's tokens"),
    ] = False
