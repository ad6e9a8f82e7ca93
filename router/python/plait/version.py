"""The version of this package."""

from __future__ import annotations

import importlib.metadata


def version() -> str:
    """As it was installed."""
    try:
        return importlib.metadata.version("plait")
    except importlib.metadata.PackageNotFoundError:
        return "from a source tree"
