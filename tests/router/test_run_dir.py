"""The directory of a server's sockets: private, short, and gone however the server ended."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from plait.launch.run_dir import LOCK, MAX_DIR_BYTES, run_directory

SERVER = """
from plait.launch.run_dir import run_directory
with run_directory() as path:
    print(path, flush=True)
    input()
"""


@pytest.fixture
def parent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder for temporary files, with a short name."""
    with tempfile.TemporaryDirectory(dir="/tmp") as made:
        monkeypatch.setenv("TMPDIR", made)
        monkeypatch.setattr("tempfile.tempdir", made)
        yield Path(made)


def test_it_is_private_and_goes_away(parent: Path) -> None:
    with run_directory() as path:
        assert path.parent == parent
        assert path.stat().st_mode & 0o777 == 0o700
        (path / "link").touch()
    assert list(parent.iterdir()) == []


@pytest.mark.parametrize("num_bytes", [65, 66, 200])
def test_its_name_is_short_where_the_folder_for_temporary_files_is_deep(
    parent: Path, monkeypatch: pytest.MonkeyPatch, num_bytes: int
) -> None:
    deep = parent / ("d" * (num_bytes - len(f"{parent}/")))
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    with run_directory() as path:
        assert len(os.fsencode(path)) <= MAX_DIR_BYTES
        assert (path.parent == deep) == (num_bytes == 65)
    assert not path.exists()


def test_what_a_killed_server_left_goes_away_with_the_next_start(parent: Path) -> None:
    others = [parent / "plait-12345678", parent / "plait-of-another-program"]
    for other in others:
        other.mkdir(mode=0o700)
    with subprocess.Popen(
        [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        left = Path(server.stdout.readline().strip())
        with run_directory():
            assert left.is_dir(), "its server lives"
        server.kill()
    assert left.is_dir()
    with run_directory() as path:
        assert set(parent.iterdir()) == {path, *others}


def test_what_another_machine_left_in_a_shared_folder_stays(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = parent / "boot-id"
    elsewhere.write_text("another machine's")
    left = parent / "plait-12345678"
    left.mkdir(mode=0o700)
    (left / LOCK).write_bytes(elsewhere.read_bytes())
    with run_directory():
        assert left.is_dir()
    monkeypatch.setattr("plait.launch.run_dir.BOOT_ID", elsewhere)
    with run_directory():
        assert not left.exists(), "that machine itself removes it"


def test_a_file_system_without_locks_is_no_obstacle(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plait.launch.run_dir.BOOT_ID", parent / "missing")
    with run_directory() as path:
        assert path.is_dir()
    assert not path.exists()
