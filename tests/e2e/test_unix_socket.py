"""A server that listens on a Unix socket."""

from __future__ import annotations

import socket
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from plait.launch.listen_unix import MAX_PATH_BYTES
from plait_testing.running_server import StartServer

BODY = {"prompt": "abc", "max_tokens": 40, "ignore_eos": True, "temperature": 0}


@pytest.fixture
def path() -> Iterator[Path]:
    """In a folder with a short name."""
    with tempfile.TemporaryDirectory(prefix="plait-") as folder:
        yield Path(folder) / "socket"


def left_over(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(path))


def test_clients_are_answered_over_a_unix_socket(server: StartServer, check_models: Path, path: Path) -> None:
    left_over(path)
    running = server(check_models / "recall-gqa", "--threads=1", "--max-seqs=4", f"--uds={path}")
    assert running.url == f"unix:{path}", running.errors
    assert stat.S_IMODE(path.stat().st_mode) == 0o660
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://x", timeout=120) as client:
        whole = client.post("/v1/completions", json=BODY)
        streamed = client.post("/v1/completions", json=BODY | {"stream": True})
        again = client.get("/ready")
    assert whole.json()["usage"]["completion_tokens"] == 40
    assert streamed.text.endswith("data: [DONE]\n\n")
    assert again.status_code == 200
    second = server(Path("/no/such/model"), f"--uds={path}")
    assert second.wait() == 2
    assert f"--uds {path} is in use" in second.last_line
    assert f"curl -N --unix-socket {path} http://localhost/v1/" in running.read_line("curl")
    assert running.stop() == 0, running.errors
    assert not path.exists()


def test_a_path_that_cannot_be_a_socket_is_refused(server: StartServer, path: Path) -> None:
    path.write_text("something")
    for given, said in (
        (path, "exists and is no socket"),
        (path / "under", "cannot be listened on: Not a directory"),
        (path.with_name("x" * MAX_PATH_BYTES), "has over 107 bytes"),
    ):
        refused = server(Path("/no/such/model"), f"--uds={given}")
        assert refused.wait() == 2
        assert said in refused.last_line
    assert path.read_text() == "something"
