"""Scheduler and page settings are the same in Python and in Rust: names, order, types and defaults.

`settings.json` holds the defaults of each struct and one other value of every field. Python is checked here, Rust in
`router/core/tests/core/settings_mirror.rs`; whoever adds a setting adds it to the file. The launch fills in the
page size, whose default is the family's.
"""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from plait.settings import PAGE_SIZE, PageSettings, SchedulerSettings

GOLDEN: dict[str, dict[str, dict[str, Any]]] = msgspec.json.decode(
    Path(__file__).with_name("settings.json").read_bytes()
)
STRUCTS = {"scheduler": SchedulerSettings, "pages": PageSettings}
FILLED_IN = {"scheduler": SchedulerSettings(), "pages": PageSettings(page_size=PAGE_SIZE)}


def test_the_file_has_both_structs() -> None:
    assert GOLDEN.keys() == STRUCTS.keys()


@pytest.mark.parametrize("name", STRUCTS)
def test_defaults_are_the_files(name: str) -> None:
    assert list(msgspec.to_builtins(FILLED_IN[name]).items()) == list(GOLDEN[name]["defaults"].items())


@pytest.mark.parametrize("name", STRUCTS)
def test_every_field_takes_the_files_other_value(name: str) -> None:
    others = GOLDEN[name]["others"]
    assert msgspec.to_builtins(msgspec.convert(others, type=STRUCTS[name])) == others
    defaults = GOLDEN[name]["defaults"]
    assert others.keys() == defaults.keys()
    assert [field for field in others if others[field] == defaults[field]] == []
