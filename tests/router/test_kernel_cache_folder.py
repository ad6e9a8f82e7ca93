"""Ranks are told where compiled kernels are kept: in the user's cache folder."""

from __future__ import annotations

from pathlib import Path

import pytest
from plait.launch.worker import rank_words

XDG = {"HOME": "/home/u", "XDG_CACHE_HOME": "/cache"}


@pytest.mark.parametrize(
    ("environment", "folder"),
    [
        ({"HOME": "/home/u"}, "/home/u/.cache/plait/kernels"),
        (XDG, "/cache/plait/kernels"),
        (XDG | {"XDG_CACHE_HOME": ""}, "/home/u/.cache/plait/kernels"),
        (XDG | {"XDG_CACHE_HOME": "no/whole/path"}, "/home/u/.cache/plait/kernels"),
    ],
)
def test_the_folder_is_the_users(environment: dict[str, str], folder: str) -> None:
    words = rank_words(0, "ipc:///run", Path("/run/worker.json"), environment)
    assert words[words.index("--kernel-cache") + 1] == folder


@pytest.mark.parametrize("environment", [{}, {"HOME": ""}, {"HOME": "below"}])
def test_nothing_is_kept_without_a_whole_path(environment: dict[str, str]) -> None:
    assert "--kernel-cache" not in rank_words(0, "ipc:///run", Path("/run/worker.json"), environment)
