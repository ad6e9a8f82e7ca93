"""The directory of a server's sockets: private, short, and gone however the server ended."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from plait.launch.run_dir import MAX_DIR_BYTES, run_directory

SERVER = """
from plait.launch.run_dir import run_directory
with run_directory() as path:
    print(path, flush=True)
    input()
"""


def test_it_is_private_short_and_goes_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    with run_directory() as path:
        assert path.stat().st_mode & 0o777 == 0o700
        assert len(os.fsencode(path)) <= MAX_DIR_BYTES
        (path / "link").touch()
    assert not path.exists()


def test_what_a_killed_server_left_goes_away_with_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    others = tmp_path / "plait-of-another-program"
    others.mkdir()
    with subprocess.Popen(
        [sys.executable, "-c", SERVER], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        left = Path(server.stdout.readline().strip())
        with run_directory():
            assert left.is_dir(), "its server lives"
        server.kill()
    assert left.is_dir()
    with run_directory() as path:
        assert set(tmp_path.iterdir()) == {path, others}
