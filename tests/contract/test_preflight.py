"""The preflight names each thing that a machine lacks, and the command that brings it."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from plait_testing import budgets

TOOLS = ("sh", "sed", "sort", "head", "cut", "make", "cc", "c++")


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A folder of commands that has all but cargo and Python."""
    for tool in TOOLS:
        found = shutil.which(tool)
        assert found, tool
        (tmp_path / tool).symlink_to(found)
    return tmp_path


def command(machine: Path, name: str, script: str) -> None:
    (machine / name).write_text(f"#!/bin/sh\n{script}\n")
    (machine / name).chmod(0o755)


def preflight(machine: Path, python: str = sys.executable) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["tools/preflight.sh"],
        cwd=budgets.ROOT,
        env={"PATH": str(machine), "PYTHON": python},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_machine_without_cargo_passes_and_the_python_is_printed(machine: Path) -> None:
    result = preflight(machine)
    assert (result.returncode, result.stdout.strip()) == (0, sys.executable), result.stderr


def test_an_old_cargo_is_named_with_its_version(machine: Path) -> None:
    command(machine, "cargo", "echo 'cargo 1.63.0 (abc 2022-01-01)'")
    result = preflight(machine)
    assert result.returncode == 1
    assert "cargo is 1.63.0" in result.stderr
    assert "sudo apt remove cargo rustc" in result.stderr


def test_an_old_cargo_of_rustup_is_mended_by_rustup(machine: Path) -> None:
    command(machine, "cargo", "echo 'cargo 1.9.0'")
    command(machine, "rustup", "true")
    assert "rustup update stable" in preflight(machine).stderr


def test_a_new_cargo_passes(machine: Path) -> None:
    command(machine, "cargo", "echo 'cargo 1.100.0 (abc 2030-01-01)'")
    assert preflight(machine).returncode == 0


def test_all_that_is_missing_is_named_at_once(machine: Path) -> None:
    (machine / "c++").unlink()
    command(machine, "old-python", "exit 1")
    result = preflight(machine, "old-python")
    assert result.returncode == 1
    assert "sudo apt install build-essential" in result.stderr
    assert "Python 3.11 or newer" in result.stderr


def test_a_python_without_venv_is_named_with_its_package(machine: Path) -> None:
    command(machine, "bare-python", f'case "$2" in *ensurepip*) exit 1;; esac; exec {sys.executable} "$@"')
    result = preflight(machine, "bare-python")
    assert result.returncode == 1
    assert f"python3.{sys.version_info.minor}-venv" in result.stderr
