"""Settings that are each allowed, but not together."""

from __future__ import annotations

from pathlib import Path

from plait.errors import SettingsError
from plait.http.origins import check_origins
from plait.http.root_path import check_root_path
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
    _check_proxy(settings)
    if settings.pages.page_size is not None and settings.pages.page_size.bit_count() != 1:
        raise SettingsError(f"--page-size is {settings.pages.page_size}; allowed: a power of two from 1 to 1024")
    if settings.scheduler.itl_target_ms is not None and not settings.scheduler.mixed:
        raise SettingsError("--itl-target-ms needs mixed steps; leave out --itl-target-ms or --no-mixed")
    if settings.scheduler.policy == "cache-aware" and not settings.pages.prefix_cache:
        raise SettingsError("--policy cache-aware needs the prefix cache; leave out --policy or --no-prefix-cache")


def _check_proxy(settings: ServeSettings) -> None:
    if settings.proxy.root_path is not None:
        check_root_path(settings.proxy.root_path)
    check_origins(settings.proxy.allowed_origins or ())
    if settings.proxy.uds is not None and settings.tls.ssl_certfile is not None:
        raise SettingsError("--uds and --ssl-certfile: a Unix socket needs no TLS; leave one of them out")
