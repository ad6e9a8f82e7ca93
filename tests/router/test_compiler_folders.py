"""What pip installed, flashinfer finds, though nothing activated the environment that it lies in."""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path

import pytest
from plait import cli


def test_ninja_and_cudas_headers_are_looked_for_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    headers = tmp_path / "nvidia" / "cu13" / "include"
    headers.mkdir(parents=True)
    (headers / "curand_kernel.h").touch()
    monkeypatch.delitem(sys.modules, "nvidia", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PATH", "/bin")
    monkeypatch.setenv("CPLUS_INCLUDE_PATH", "/own")
    monkeypatch.setattr(cli, "run", lambda _words: 0)
    for _ in range(2):  # a process that it starts runs it again
        with pytest.raises(SystemExit):
            cli.main()
    assert os.environ["PATH"] == f"/bin:{sysconfig.get_path('scripts')}"
    assert os.environ["CPLUS_INCLUDE_PATH"].split(":")[:2] == ["/own", str(headers)]
