"""Settings of what stands between clients and the server: proxies and browsers."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from plait.setting import Setting

RootPath = Annotated[str, Meta(min_length=2, max_length=256)]
Origin = Annotated[str, Meta(min_length=1, max_length=256)]


class ProxySettings(msgspec.Struct, frozen=True, kw_only=True):
    """Proxies and browsers."""

    uds: Annotated[
        str | None,
        Setting(
            "Unix socket to listen on, in place of --host and --port; this process's user and group reach it, and no "
            "key is needed",
            unset="a TCP port",
        ),
    ] = None
    root_path: Annotated[
        RootPath | None,
        Setting(
            "beginning of all paths at the proxy, such as /llm; requests may come with it or without", unset="none"
        ),
    ] = None
    allowed_origins: Annotated[
        tuple[Origin, ...] | None,
        Setting(
            "web pages whose scripts may ask this server, such as https://chat.example.org; * stands for all. MODEL "
            "comes before them",
            unset="none",
        ),
    ] = None
