"""Settings of what stands between clients and the server: proxies and browsers."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from plait.setting import Setting

RootPath = Annotated[str, Meta(min_length=2, max_length=256)]
Origin = Annotated[str, Meta(min_length=1, max_length=256)]
CommentSeconds = Annotated[float, Meta(ge=0, le=3600)]
COMMENT_SECONDS = 15.0
"""Many proxies cut a line after 30 s or 60 s."""


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
    stream_comment_seconds: Annotated[
        CommentSeconds,
        Setting(
            "time in s after which a stream on which nothing comes gets an SSE comment, so that proxies hold the line: "
            "half of the time after which they cut it, or less. 0 writes none"
        ),
    ] = COMMENT_SECONDS
