"""The engine's own words about itself, typed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec

if TYPE_CHECKING:
    from plait._router import Engine

Phase = Literal["loading", "ready", "draining", "stopped", "failed"]


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """`Engine.status()`; see `_router.pyi`."""

    phase: Phase
    reason: str | None = None
    exit_code: int | None = None
    step: int = 0
    idle: bool = True
    stuck: bool = False
    num_pages: int | None = None
    page_bytes: int | None = None
    weight_bytes: int | None = None
    device: str | None = None
    dtype: str | None = None


class Description(msgspec.Struct, frozen=True, kw_only=True):
    """`Engine.describe()`; see `_router.pyi`."""

    model_id: str
    architecture: str
    max_model_len: int


def read_status(engine: Engine) -> Status:
    """Where the engine stands now."""
    return msgspec.json.decode(engine.status(), type=Status)


def read_description(engine: Engine) -> Description:
    """What the engine serves."""
    return msgspec.json.decode(engine.describe(), type=Description)
