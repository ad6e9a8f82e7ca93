"""Where a rank keeps the CUDA kernels that it compiles: the user's cache folder."""

from __future__ import annotations

from collections.abc import Mapping


def kernel_cache_words(environment: Mapping[str, str]) -> list[str]:
    """The argument of a rank; none without a whole path."""
    home = environment.get("HOME")
    folders = environment.get("XDG_CACHE_HOME", ""), f"{home}/.cache" if home else ""
    cache = next((folder for folder in folders if folder.startswith("/")), None)
    return [] if cache is None else ["--kernel-cache", f"{cache}/plait/kernels"]
