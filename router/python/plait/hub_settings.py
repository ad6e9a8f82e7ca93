"""Settings of models that come from the hub."""

from __future__ import annotations

from typing import Annotated

import msgspec

from plait.setting import Setting


class HubSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Models of the hub."""

    revision: Annotated[
        str | None,
        Setting("branch, tag or commit of a model that is named by its hub id", unset="the hub's main branch"),
    ] = None
    download_dir: Annotated[
        str | None, Setting("folder in which models of the hub are kept", unset="the hub library's own cache")
    ] = None
