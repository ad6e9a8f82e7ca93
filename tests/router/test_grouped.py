"""Engines of a group say what they compute with, and are refused what only one alone can keep."""

from __future__ import annotations

from pathlib import Path

import pytest
from plait.errors import SettingsError
from plait.flags import Parser, add_flags, read_settings
from plait.launch.group_checks import with_facts
from plait.model_files import LocalModel
from plait.settings import GroupMembership, ServeSettings

PLACE = GroupMembership(engine=0, num_engines=2, endpoint="ipc:///run/votes")


def parse(*words: str) -> ServeSettings:
    parser = Parser(prog="plait")
    add_flags(parser, ServeSettings)
    return read_settings(parser.parse_args(words), ServeSettings)


def model(folder: Path, config: str = "{}", num_bytes: int = 8) -> LocalModel:
    folder.mkdir()
    (folder / "config.json").write_text(config)
    (folder / "model.safetensors").write_bytes(bytes(num_bytes))
    return LocalModel(folder, None)


def test_the_same_model_elsewhere_is_the_same(tmp_path: Path) -> None:
    here, there = model(tmp_path / "a"), model(tmp_path / "b")
    assert with_facts(PLACE, here, parse()) == with_facts(PLACE, there, parse("--port", "9"))


@pytest.mark.parametrize("words", [("--dtype", "float32"), ("--kv-cache-dtype", "fp8"), ("--load-format", "dummy")])
def test_other_numbers_change_their_fact(words: tuple[str, ...], tmp_path: Path) -> None:
    folder = model(tmp_path / "a")
    usual, other = (with_facts(PLACE, folder, parse(*given)).facts for given in ((), words))
    assert {name for name in usual if usual[name] != other[name]} == {words[0]}


def test_other_models_have_other_facts(tmp_path: Path) -> None:
    models = [model(tmp_path / "a"), model(tmp_path / "b", config="[]"), model(tmp_path / "c", num_bytes=9)]
    facts = [with_facts(PLACE, each, parse()).facts for each in models]
    assert [facts[0][name] == facts[1][name] for name in ("config.json", "files of the model")] == [False, True]
    assert [facts[0][name] == facts[2][name] for name in ("config.json", "files of the model")] == [True, False]


@pytest.mark.parametrize("words", [("--itl-target-ms", "30"), ("--step-trace", "steps.jsonl")])
def test_what_times_one_engine_alone_is_refused(words: tuple[str, ...], tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=f"{words[0]} .* leave it out of a group"):
        with_facts(PLACE, model(tmp_path / "a"), parse(*words))
