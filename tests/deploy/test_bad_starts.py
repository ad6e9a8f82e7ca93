"""The chart's command line where something is missing: its exit code, its last line, and docs/deploying.md."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from plait import cli
from plait.settings import DeviceSettings, ProcessSettings, ServeSettings
from plait.shared_memory import MIN_SHM_BYTES, note_for_ranks
from plait_proto import ExitCode
from plait_testing import budgets

KEYS = "sk-0123456789abcdef0123456789abcdef"


class Pod:
    """Its volumes as folders: keys and a model are there, unless a mistake takes them away."""

    def __init__(self, folder: Path, models: Path) -> None:
        self.keys, self.models = folder / "keys.txt", folder / "models"
        self.keys.write_text(KEYS)
        self.keys.chmod(0o440)
        self.models.mkdir()
        (self.models / "recall-gqa").symlink_to(models / "recall-gqa")
        self.more: list[str] = []

    def args(self) -> list[str]:
        documents = yaml.safe_load_all((budgets.ROOT / "tests/deploy/golden/cpu.yaml").read_text())
        (deployment,) = (one for one in documents if one is not None and one["kind"] == "Deployment")
        words: list[str] = deployment["spec"]["template"]["spec"]["containers"][0]["args"] + self.more
        paths = {"/models/": f"{self.models}/", "/etc/plait/keys.txt": str(self.keys)}
        for mounted, folder in paths.items():
            words = [word.replace(mounted, folder) for word in words]
        return words


def empty_volume(pod: Pod) -> None:
    (pod.models / "recall-gqa").unlink()


def empty_folder(pod: Pod) -> None:
    empty_volume(pod)
    (pod.models / "recall-gqa").mkdir()


def no_such_item(pod: Pod) -> None:
    pod.keys.unlink()


def no_key_in_the_item(pod: Pod) -> None:
    pod.keys.chmod(0o600)
    pod.keys.write_text("\n")


def open_to_others(pod: Pod) -> None:
    pod.keys.chmod(0o444)


def unknown_flag(pod: Pod) -> None:
    pod.more = ["--max-num-sequences=4"]


Mistake = Callable[[Pod], None]
CASES = [
    (empty_volume, ExitCode.MODEL_FILES, "there is no file or folder"),
    (empty_folder, ExitCode.MODEL_FILES, "has no config.json; give a folder in Hugging Face's format, or a .gguf file"),
    (no_such_item, ExitCode.SETTINGS, "cannot be read: No such file or directory"),
    (no_key_in_the_item, ExitCode.SETTINGS, "holds no key; write one a line"),
    (open_to_others, ExitCode.SETTINGS, "is readable by other users"),
    (unknown_flag, ExitCode.SETTINGS, "unknown setting"),
]


@pytest.fixture
def pod(tmp_path: Path, check_models: Path) -> Pod:
    return Pod(tmp_path, check_models)


def page() -> str:
    return (budgets.ROOT / "docs" / "deploying.md").read_text()


@pytest.mark.parametrize(("mistake", "code", "words"), CASES, ids=lambda one: getattr(one, "__name__", None))
def test_a_start_that_lacks_something_says_what(
    mistake: Mistake, code: ExitCode, words: str, pod: Pod, capsys: pytest.CaptureFixture[str]
) -> None:
    mistake(pod)
    assert cli.run([*pod.args(), "--port=0"]) == code
    (line,) = capsys.readouterr().err.splitlines()
    assert f"(exit code {code})" in line
    assert words in line
    assert words in page()


def test_a_port_in_use_is_named_before_the_model_loads(pod: Pod, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("0.0.0.0", 0)) as held:
        port = held.getsockname()[1]
        assert cli.run([*pod.args(), f"--port={port}"]) == ExitCode.SETTINGS
    printed = capsys.readouterr()
    assert f"port {port} on 0.0.0.0 is in use; choose another with --port" in printed.err
    assert "Loading" not in printed.out
    assert "is in use; choose another with --port" in page()


def test_too_little_shared_memory_is_a_note_where_ranks_on_gpus_exchange() -> None:
    two = ServeSettings(device=DeviceSettings(device="cuda"), process=ProcessSettings(tp=2))
    note = note_for_ranks(two, 64 << 20)
    assert note == "/dev/shm has 64 MiB, NCCL may want 1024; docker run --shm-size=8g, or the chart's value shm"
    assert note.split(";")[0] in page()
    assert note_for_ranks(two, MIN_SHM_BYTES) == ""
    assert note_for_ranks(ServeSettings(device=DeviceSettings(device="cuda")), 64 << 20) == ""
    on_cpus = ServeSettings(device=DeviceSettings(device="cpu"), process=ProcessSettings(tp=2))
    assert note_for_ranks(on_cpus, 64 << 20) == ""
