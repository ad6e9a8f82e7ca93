"""The engine's links and those of Python's processes close after the same silence."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from plait_proto import silent_links

ROOT = Path(__file__).resolve().parent.parent.parent

NUMBERS = {
    "KEEPALIVE_IDLE": silent_links.KEEPALIVE_IDLE_SECONDS,
    "KEEPALIVE_INTERVAL": silent_links.KEEPALIVE_INTERVAL_SECONDS,
    "KEEPALIVE_PROBES": silent_links.KEEPALIVE_PROBES,
    "UNACKNOWLEDGED_MILLIS": silent_links.UNACKNOWLEDGED_MILLIS,
}


@pytest.mark.parametrize("name", NUMBERS)
def test_both_languages_have_the_same_number(name: str) -> None:
    source = (ROOT / "router/engine/src/socket_options.rs").read_text()
    found = re.search(rf"^const {name}: i32 = (\d+);$", source, re.MULTILINE)
    assert found is not None
    assert int(found[1]) == NUMBERS[name]
