"""Key files: their modes, and what is wrong with files that do not fit."""

from __future__ import annotations

from pathlib import Path

import pytest
import zmq
from plait.cli import run
from plait.errors import SettingsError
from plait.launch.group_place import group_place
from plait.nodes.key_files import read_keys, write_new_keys
from plait.nodes.launch import with_keys_of_now
from plait.nodes.layout import plan_layout
from plait.nodes.place import Place
from plait.nodes.plan import LaunchPlan
from plait.nodes.settings import LaunchSettings, NodeSettings
from plait.settings import GroupSettings, ServeSettings


def test_keys_new_writes_files_that_the_group_of_engines_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "keys"
    assert run(["keys", "new", str(folder), "--nodes", "2"]) == 0
    assert "node-1.key" in capsys.readouterr().out
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {file.name: file.stat().st_mode & 0o777 for file in folder.iterdir()} == {
        "public.keys": 0o644,
        "node-0.key": 0o600,
        "node-1.key": 0o600,
    }
    keys = read_keys(folder, 1, 2)
    assert zmq.curve_public(keys.secret) == keys.public[1]
    group = GroupSettings(
        group_engines=2,
        group_engine=1,
        group_endpoint="tcp://10.0.0.1:1",
        group_secret_key_file=str(folder / "node-1.key"),
        group_public_keys_file=str(folder / "public.keys"),
    )
    assert group_place(ServeSettings(group=group)) is not None


def test_keys_that_exist_are_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_new_keys(tmp_path, 2)
    before = (tmp_path / "node-0.key").read_text()
    assert run(["keys", "new", str(tmp_path), "--nodes", "3"]) == 2
    assert "public.keys exists" in capsys.readouterr().err
    assert (tmp_path / "node-0.key").read_text() == before


def test_a_restart_meets_with_the_keys_that_are_there_then(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Links that are open do not depend on the files any more."""
    write_new_keys(tmp_path / "keys", 2)
    write_new_keys(tmp_path / "new", 2)
    settings = LaunchSettings(nodes=NodeSettings(nnodes=2, node_rank=1, keys=str(tmp_path / "keys")))
    plan = LaunchPlan(
        model=None,
        settings=settings,
        place=Place(num_nodes=2, node=1, head="127.0.0.1", head_port=7450, said_by="--node-rank"),
        layout=plan_layout(num_nodes=2, tp=1, dp=2, dp_attention=False, gpus_per_node=0),
        head_address="127.0.0.1",
        address="127.0.0.1",
        address_reason="",
        gpus=(),
        environment={},
        keys=read_keys(tmp_path / "keys", 1, 2),
        words=[],
        ports=[],
    )
    assert with_keys_of_now(plan) == plan
    for name in ("public.keys", "node-1.key"):
        (tmp_path / "new" / name).rename(tmp_path / "keys" / name)
    renewed = with_keys_of_now(plan)
    assert renewed.keys == read_keys(tmp_path / "keys", 1, 2) != plan.keys
    assert capsys.readouterr().out == "The key files have changed: the nodes meet with the new keys\n"
    (tmp_path / "keys" / "node-1.key").write_text("short")
    with pytest.raises(SettingsError, match="plait keys new"):
        with_keys_of_now(renewed)


def spoil(folder: Path, how: str) -> None:
    own, public = folder / "node-1.key", folder / "public.keys"
    match how:
        case "missing":
            own.unlink()
        case "open":
            own.chmod(0o640)
        case "another's":
            own.write_text((folder / "node-0.key").read_text())
        case "short":
            own.write_text("x" * 39)
        case "no key":
            own.write_text("~" * 40)
        case "too few":
            public.write_text(public.read_text().split()[0])
        case "writable":
            public.chmod(0o664)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("missing", "node-1.key cannot be read"),
        ("open", "run `chmod 600"),
        ("another's", "is not the key in line 2"),
        ("short", "it needs 2 and 1, of 40 characters"),
        ("no key", "is not the key in line 2"),
        ("too few", "has 1 public keys"),
        ("writable", "public.keys can be written by other users"),
    ],
)
def test_keys_that_cannot_be_used_are_refused(how: str, said: str, tmp_path: Path) -> None:
    write_new_keys(tmp_path, 2)
    spoil(tmp_path, how)
    with pytest.raises(SettingsError) as error:
        read_keys(tmp_path, 1, 2)
    assert said in error.value.message
