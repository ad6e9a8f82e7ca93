"""Settings that are each allowed, but not together."""

from __future__ import annotations

from plait.errors import SettingsError
from plait.settings import ServeSettings


def check_settings(settings: ServeSettings) -> None:
    """Raise `SettingsError` for settings that do not fit together."""
    if settings.pages.page_size.bit_count() != 1:
        raise SettingsError(f"--page-size is {settings.pages.page_size}; allowed: a power of two from 1 to 1024")
    if settings.scheduler.itl_target_ms is not None and not settings.scheduler.mixed:
        raise SettingsError("--itl-target-ms needs mixed steps; leave out --itl-target-ms or --no-mixed")
    if settings.scheduler.policy == "cache-aware" and not settings.pages.prefix_cache:
        raise SettingsError("--policy cache-aware needs the prefix cache; leave out --policy or --no-prefix-cache")
