"""The engine's links and those of Python's processes close after the same silence."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from plait_proto.silent_links import SILENT_LINK_OPTIONS

ROOT = Path(__file__).resolve().parent.parent.parent

NAMES = {
    "KEEPALIVE_IDLE": "tcp_keepalive_idle",
    "KEEPALIVE_INTERVAL": "tcp_keepalive_intvl",
    "KEEPALIVE_PROBES": "tcp_keepalive_cnt",
    "UNACKNOWLEDGED_MILLIS": "tcp_maxrt",
}


@pytest.mark.parametrize("name", NAMES)
def test_both_languages_have_the_same_number(name: str) -> None:
    source = (ROOT / "router/engine/src/socket_options.rs").read_text()
    found = re.search(rf"^const {name}: i32 = (\d+);$", source, re.MULTILINE)
    assert found is not None
    assert int(found[1]) == SILENT_LINK_OPTIONS[NAMES[name]]
