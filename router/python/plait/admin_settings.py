"""Settings of the admin listener."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from plait.setting import Setting

AdminPort = Annotated[int, Meta(ge=0, le=65_535)]


class AdminSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Admin listener."""

    admin_port: Annotated[
        AdminPort | None,
        Setting(
            "TCP port of a listener of its own for operators: /metrics, live requests, flush, pause, drain; 0 takes a "
            "free one, which a line on standard output prints",
            unset="there is none",
        ),
    ] = None
    admin_host: Annotated[str, Setting("address of the admin listener; any but loopback needs --admin-key-file")] = (
        "127.0.0.1"
    )
    admin_key_file: Annotated[
        str | None,
        Setting(
            "file with one key a line for the admin listener, as --api-key-file has them; API keys do not open it",
            unset="who reaches the listener needs no key",
        ),
    ] = None
    profile_dir: Annotated[
        str | None,
        Setting(
            "folder for the traces of POST /admin/profile, which profiles the next steps of all ranks; made if it is "
            "not there",
            unset="no profile can be taken",
        ),
    ] = None
