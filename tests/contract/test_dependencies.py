"""What Plait depends on has licences that allow it; and a check of vulnerabilities that did not happen is no pass."""

from __future__ import annotations

import importlib.util
import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import ModuleType
from typing import Any

import pytest
from plait_testing import budgets


@pytest.fixture(scope="module")
def check() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_dependencies", budgets.ROOT / "tools/check_dependencies.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["check_dependencies"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextmanager
def source(answer: object) -> Iterator[tuple[str, list[Any]]]:
    """An advisory source that always says this, and what it was asked."""
    asked: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

        def log_message(self, *_: object) -> None:
            """Nobody reads it."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", asked
        server.shutdown()


def test_every_crate_has_an_allowed_licence(check: ModuleType) -> None:
    crates = list(check.crates())
    assert len(crates) > 100
    assert check.unlicensed(crates) == []


def test_every_python_package_has_an_allowed_licence(check: ModuleType) -> None:
    packages = list(check.python_packages())
    assert {"fastapi", "torch", "pyzmq"} <= {package.name for package in packages}
    assert check.unlicensed(packages) == []


@pytest.mark.parametrize(
    "licence",
    [
        "MIT/Apache-2.0",
        "MIT OR GPL-3.0",
        "(MIT OR Apache-2.0) AND Unicode-3.0",
        "Apache-2.0 WITH LLVM-exception",
        "GPL-3.0 AND MIT OR Zlib",
    ],
)
def test_a_choice_of_allowed_licences_is_enough(check: ModuleType, licence: str) -> None:
    assert check.is_allowed(licence)


@pytest.mark.parametrize(
    "licence",
    ["", "GPL-3.0", "MIT AND GPL-3.0", "MIT WITH Other-exception", "(MIT", "MIT OR", "MIT MIT", "Proprietary"],
)
def test_anything_else_is_refused(check: ModuleType, licence: str) -> None:
    assert not check.is_allowed(licence)


def test_an_advisory_for_a_version_is_told_and_an_accepted_one_is_not(
    check: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = [check.Package("PyPI", "a", "1", "MIT"), check.Package("crates.io", "b", "2", "MIT")]
    with source({"results": [{}, {"vulns": [{"id": "RUSTSEC-1"}, {"id": "RUSTSEC-2"}]}]}) as (url, asked):
        assert [line.split()[5] for line in check.vulnerable(packages, url)] == ["by", "by"]
        monkeypatch.setitem(check.ACCEPTED, "RUSTSEC-1", "a test's")
        (line,) = check.vulnerable(packages, url)
    assert line == "b 2 (crates.io) is concerned by RUSTSEC-2 (https://osv.dev/RUSTSEC-2)"
    assert asked[0]["queries"][1] == {"package": {"name": "b", "ecosystem": "crates.io"}, "version": "2"}


@pytest.mark.parametrize("answer", [{}, [], {"results": []}, {"results": None}])
def test_an_answer_of_another_form_is_no_pass(check: ModuleType, answer: object) -> None:
    with source(answer) as (url, _), pytest.raises(OSError, match="answer"):
        check.vulnerable([check.Package("PyPI", "a", "1", "MIT")], url)


def test_a_source_that_cannot_be_asked_is_said_and_fails(
    check: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check.vulnerable, "__defaults__", ("http://127.0.0.1:1",))
    assert check.main(["vulnerabilities"]) == check.NOT_CHECKED
    assert "NOT checked" in capsys.readouterr().err
