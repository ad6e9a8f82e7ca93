"""The installer follows Plait's own rules, and retries what it could not get."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import plait.nvidia
import pytest

INSTALL = Path(__file__).parents[2] / "tools/install.py"


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The installer, which installs nothing."""
    spec = importlib.util.spec_from_file_location("install", INSTALL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name in ("install_torch", "install_rooms", "install_demo_model"):
        monkeypatch.setattr(module, name, lambda *_: None)
    return module


def test_whether_a_gpu_is_there_is_one_rule(install: ModuleType) -> None:
    assert install.has_nvidia_gpu() == plait.nvidia.has_nvidia_gpu()
    assert "nvidia-smi" not in INSTALL.read_text()


@pytest.mark.parametrize("is_there", [True, False])
def test_tests_are_installed_only_when_all_they_need_is_there(
    is_there: bool, install: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(install.importlib.util, "find_spec", lambda _name: None)
    monkeypatch.setattr(install, "pip", lambda *_words: is_there)
    plain, tested = tmp_path / "installed", tmp_path / "tested"
    monkeypatch.setattr(sys, "argv", ["install.py", "--stamp", str(plain), "--test-stamp", str(tested)])
    install.main()
    assert plain.exists()
    assert tested.exists() == is_there


def test_a_router_of_another_profile_is_for_tests_alone(
    install: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(install, "install_flashinfer", lambda: True)
    plain, tested = tmp_path / "installed", tmp_path / "tested"
    words = ["install.py", "--stamp", str(plain), "--test-stamp", str(tested)]
    for profile in ("release", "dev"):
        monkeypatch.setattr(sys, "argv", [*words, "--router-profile", profile])
        install.main()
        assert plain.exists() == (profile == "release"), "whoever serves builds the release"
        assert tested.exists()
