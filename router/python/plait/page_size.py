"""Tokens of a page: the user's number, or what the model's family takes."""

from __future__ import annotations

from pathlib import Path

import msgspec
from plait_proto import UNDECODABLE, family_of

from plait.settings import PAGE_SIZE, ServeSettings


class _Config(msgspec.Struct):
    """What is read of a ``config.json``."""

    architectures: tuple[str, ...] = ()


def with_page_size(settings: ServeSettings, model: Path) -> ServeSettings:
    """The settings with the page size filled in."""
    if settings.pages.page_size is not None:
        return settings
    pages = msgspec.structs.replace(settings.pages, page_size=_page_size_of(model))
    return msgspec.structs.replace(settings, pages=pages)


def _page_size_of(model: Path) -> int:
    """The usual one for a GGUF file, and for a configuration that cannot be read: the engine says what is wrong."""
    try:
        config = msgspec.json.decode((model / "config.json").read_bytes(), type=_Config)
    except (ValueError, OSError, *UNDECODABLE):
        return PAGE_SIZE
    family = family_of(config.architectures[0]) if config.architectures else None
    return PAGE_SIZE if family is None or family.page_size is None else family.page_size
