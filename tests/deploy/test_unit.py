"""The unit and its socket: the command line beside systemd's socket and credentials, and, if root, beside systemd."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from plait_testing import budgets
from plait_testing.control_plane import free_ports, wait_for
from plait_testing.systemd_manager import SystemdManager, reason_without_systemd

UNITS = budgets.ROOT / "deploy" / "systemd"
KEY = "sk-test-of-the-unit-0123456789abcdef"
FLAGS = "--device=cpu --threads=1 --num-pages=64"
HEADERS = {"Authorization": f"Bearer {KEY}"}
QUESTION = {"prompt": "0123 4567", "max_tokens": 4, "ignore_eos": True}


def is_serving(url: str) -> bool:
    """Whether it answers. It may load; one that ends may drop a request that it took; no client is refused."""
    try:
        done = httpx.post(f"{url}/v1/completions", json=QUESTION, headers=HEADERS, timeout=120, trust_env=False)
    except (httpx.ReadError, httpx.RemoteProtocolError):
        return False
    return done.status_code == httpx.codes.OK


def command(model: Path, credentials: Path) -> list[str]:
    """The unit's ExecStart, with this Python for that of /opt/plait."""
    (line,) = re.findall(r"^ExecStart=(.*)$", (UNITS / "plait.service").read_text(), re.MULTILINE)
    line = line.replace("${MODEL}", str(model)).replace("$FLAGS", FLAGS)
    program, *words = shlex.split(line.replace("${CREDENTIALS_DIRECTORY}", str(credentials)))
    assert program == "/opt/plait/bin/plait"
    return [sys.executable, "-m", "plait.cli", *words]


@pytest.mark.skipif(shutil.which("systemd-socket-activate") is None, reason="no systemd-socket-activate")
@pytest.mark.process
def test_its_command_serves_at_a_socket_that_systemd_holds(tmp_path: Path, check_models: Path) -> None:
    credentials = tmp_path / "credentials"
    credentials.mkdir()
    (credentials / "keys.txt").write_text(KEY)
    (credentials / "keys.txt").chmod(0o400)
    (port,) = free_ports(1)
    url, log = f"http://127.0.0.1:{port}", tmp_path / "log"
    kept = [word for name in ("PATH", "HOME", "PYTHONPATH") if name in os.environ for word in ("-E", name)]
    words = [*kept, f"--listen=127.0.0.1:{port}", *command(check_models / "recall-gqa", credentials)]
    with log.open("wb") as said:
        server = subprocess.Popen(["systemd-socket-activate", *words], stdout=said, stderr=said)
    try:
        wait_for(lambda: "Listening on" in log.read_text(), "the socket", log.read_text)
        assert httpx.get(f"{url}/v1/models", timeout=120, trust_env=False).status_code == httpx.codes.UNAUTHORIZED
        wait_for(lambda: is_serving(url), "an answer", log.read_text)
        assert f"note     {url} is systemd's socket; --host, --port and --uds are not read" in log.read_text()
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0, log.read_text()
    finally:
        server.kill()
        server.wait()


@pytest.fixture
def systemd(tmp_path: Path, check_models: Path) -> Iterator[tuple[SystemdManager, str]]:
    """A manager with the unit and its socket, and the socket's URL."""
    if missing := reason_without_systemd():
        pytest.skip(missing)
    (port,) = free_ports(1)
    with SystemdManager(tmp_path, check_models / "recall-gqa", FLAGS, KEY, port) as manager:
        yield manager, f"http://127.0.0.1:{port}"


@pytest.mark.slow
@pytest.mark.acceptance("image")
def test_systemd_runs_it_starts_it_again_and_drains_it(systemd: tuple[SystemdManager, str]) -> None:
    manager, url = systemd
    manager.systemctl("start", "plait.socket", "plait.service")
    wait_for(lambda: is_serving(url), "an answer", manager.said)
    assert httpx.get(f"{url}/v1/models", timeout=120, trust_env=False).status_code == httpx.codes.UNAUTHORIZED
    first = manager.property("MainPID")
    manager.kill()
    wait_for(lambda: is_serving(url), "an answer of the next", manager.said)
    assert manager.property("NRestarts") == "1"
    assert manager.property("MainPID") != first
    manager.systemctl("stop", "plait.socket", "plait.service")
    assert (manager.property("Result"), manager.property("ExecMainStatus")) == ("success", "0")
    assert "Draining: 0 requests in flight" in manager.log.read_text()


@pytest.mark.slow
@pytest.mark.acceptance("image")
def test_systemd_does_not_start_again_what_its_settings_end(systemd: tuple[SystemdManager, str]) -> None:
    manager, _ = systemd
    manager.set_flags("--max-num-sequences=4")
    manager.systemctl("start", "plait.service")
    wait_for(lambda: manager.property("ActiveState") == "failed", "its end", manager.said)
    assert (manager.property("Result"), manager.property("ExecMainStatus")) == ("exit-code", "2")
    assert manager.property("NRestarts") == "0"
    assert "unknown setting" in manager.log.read_text()
