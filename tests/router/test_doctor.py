"""`plait doctor`: this machine's preflight, and what the facts are read from."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
from plait.admin_settings import AdminSettings
from plait.cli import run
from plait.hub_settings import HubSettings
from plait.kv_events_settings import KvEventsSettings
from plait.nodes.facts import collect_facts, read_model_files
from plait.nodes.settings import LaunchSettings
from plait.settings import PoolingSettings, TemplateSettings
from plait.trace_settings import TraceSettings

NEEDS = ("--device", "cpu", "--port", "0")


def test_a_fit_machine_is_said_to_be(check_models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", str(check_models / "recall-mla"), *NEEDS, "--tp", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "This machine is fit to serve"
    assert {line.split()[0] for line in lines[:-1] if line.split()[1] in ("ok", "note")} == {
        *("version", "model", "gpus", "peers", "memory", "shm", "memlock", "files", "ports")
    }


def test_a_missing_model_is_named_with_its_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "/nowhere", *NEEDS]) == 4
    said = capsys.readouterr()
    assert "model    FAIL  there is no file or folder '/nowhere'" in said.out
    assert "exit code 4" in said.err


def test_a_port_in_use_is_named(check_models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        port = held.getsockname()[1]
        assert run(["doctor", str(check_models / "recall-mla"), "--device", "cpu", "--port", str(port)]) == 2
    assert f"port {port} on 127.0.0.1 is in use" in capsys.readouterr().err


def write_model(folder: Path, shards: list[str]) -> Path:
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": "1.safetensors"}}))
    for shard in shards:
        (folder / shard).write_bytes(b"12345")
    return folder


def test_the_files_of_a_model_have_their_sizes(tmp_path: Path) -> None:
    found = read_model_files(str(write_model(tmp_path, ["1.safetensors"])), HubSettings())
    assert found.problem == ""
    assert found.files["1.safetensors"] == (5, "")
    assert found.files["config.json"][0] == 2
    assert found.files["config.json"][1] != found.files["model.safetensors.index.json"][1]


def test_a_shard_that_the_index_lists_must_be_there(tmp_path: Path) -> None:
    found = read_model_files(str(write_model(tmp_path, [])), HubSettings())
    assert "lacks 1.safetensors, which its index lists" in found.problem


@pytest.mark.parametrize("index", ["{", "[]", '{"weight_map": 3}'])
def test_an_index_that_is_none_is_named(index: str, tmp_path: Path) -> None:
    write_model(tmp_path, [])
    (tmp_path / "model.safetensors.index.json").write_text(index)
    assert "has no weight_map" in read_model_files(str(tmp_path), HubSettings()).problem


def shared_settings(settings: LaunchSettings) -> dict[str, str]:
    """What a node says of the settings that must be equal on all."""
    found = collect_facts(
        node=0,
        address="127.0.0.1",
        address_reason="",
        model=None,
        settings=settings,
        gpus=(),
        ports=(),
        probe_port=0,
    )
    return found.settings


def test_addresses_and_folders_of_a_node_are_its_own() -> None:
    settings = LaunchSettings(
        kv_events=KvEventsSettings(kv_events_endpoint="tcp://10.0.0.1:5557"),
        traces=TraceSettings(otlp_traces_endpoint="http://10.0.0.1:4318/v1/traces"),
        admin=AdminSettings(admin_port=8001, profile_dir="/var/tmp/traces"),
        pooling=PoolingSettings(pooling="mean"),
    )
    assert shared_settings(settings) == {"--pooling": "mean"}


def test_a_chat_template_is_compared_by_its_content(tmp_path: Path) -> None:
    def said(file: Path) -> dict[str, str]:
        return shared_settings(LaunchSettings(template=TemplateSettings(chat_template=str(file))))

    same, other, different = (tmp_path / name for name in ("one.jinja", "two.jinja", "three.jinja"))
    same.write_text("{{ messages }}")
    other.write_text("{{ messages }}")
    different.write_text("{{ messages[0] }}")
    assert said(same) == said(other) != said(different)
