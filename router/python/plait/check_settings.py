"""Settings that are each allowed, but not together."""

from __future__ import annotations

from pathlib import Path

from plait.errors import SettingsError
from plait.settings import ServeSettings


def check_model_is_named(model: str | None, names: tuple[str, ...]) -> None:
    """Raise `SettingsError` if MODEL seems to be among the names that it is to be served under."""
    if model is None and len(names) > 1 and ("/" in names[-1] or Path(names[-1]).exists()):
        raise SettingsError(
            f"--served-model-name takes every word that follows it, {names[-1]!r} too, and no MODEL is left; "
            "write MODEL before it"
        )


def check_settings(settings: ServeSettings) -> None:
    """Raise `SettingsError` for settings that do not fit together."""
    if settings.pages.page_size is not None and settings.pages.page_size.bit_count() != 1:
        raise SettingsError(f"--page-size is {settings.pages.page_size}; allowed: a power of two from 1 to 1024")
    if settings.scheduler.itl_target_ms is not None and not settings.scheduler.mixed:
        raise SettingsError("--itl-target-ms needs mixed steps; leave out --itl-target-ms or --no-mixed")
    if settings.scheduler.policy == "cache-aware" and not settings.pages.prefix_cache:
        raise SettingsError("--policy cache-aware needs the prefix cache; leave out --policy or --no-prefix-cache")
