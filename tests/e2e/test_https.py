"""A server that speaks HTTPS to clients with certificates, whose files are renewed while it runs."""

from __future__ import annotations

import ssl
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from plait_testing.certificates import Certificate, authority, replace_file, signed
from plait_testing.running_server import Server, start_server
from plait_testing.slow_steps import SlowSteps

TIMEOUT = 120
BODY: dict[str, Any] = {"prompt": "abc", "max_tokens": 60, "ignore_eos": True, "temperature": 0}


@dataclass
class Shared:
    """One server, its own files, and those that may take their places."""

    server: Server
    files: Path
    made: dict[str, Certificate]

    def client(self, shows: str | None) -> httpx.Client:
        """A client that trusts the first authority and shows a certificate."""
        context = ssl.create_default_context(cafile=self.made["root"].cert)
        if shows is not None:
            context.load_cert_chain(self.made[shows].cert, self.made[shows].key)
        return httpx.Client(verify=context, timeout=TIMEOUT, base_url=self.server.url)

    def wait_for_log(self, line: str) -> None:
        deadline = time.monotonic() + TIMEOUT
        while line not in self.server.errors:
            assert time.monotonic() < deadline, self.server.errors
            time.sleep(0.05)


@pytest.fixture(scope="module")
def shared(check_models: Path, recall_steps: SlowSteps, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    folder, files = tmp_path_factory.mktemp("made"), tmp_path_factory.mktemp("files")
    made = {"root": authority(folder, "root"), "clients": authority(folder, "clients")}
    made |= {name: signed(made["root"], folder, name) for name in ("server", "known")}
    made["new"] = signed(made["clients"], folder, "new")
    own = {"cert": made["server"].cert, "key": made["server"].key, "ca": made["root"].cert}
    for name, file in own.items():
        replace_file(files / name, file)
    flags = (f"--ssl-certfile={files}/cert", f"--ssl-keyfile={files}/key", f"--ssl-ca-certs={files}/ca")
    with recall_steps.of_servers():
        server = start_server(files / "log", check_models / "recall-gqa", "--threads=1", "--max-seqs=4", *flags)
    assert server.url.startswith("https://"), server.errors
    yield Shared(server, files, made)
    server.kill()


def test_a_client_with_a_certificate_is_answered_and_one_without_is_not(shared: Shared) -> None:
    with shared.client("known") as client:
        whole = client.post("/v1/completions", json=BODY)
        streamed = client.post("/v1/completions", json=BODY | {"stream": True})
    assert whole.status_code == 200, whole.text
    assert streamed.text.endswith("data: [DONE]\n\n")
    for shows in (None, "new"):
        with pytest.raises(httpx.TransportError), shared.client(shows) as client:
            client.get("/health")


def test_renewed_files_count_for_new_connections_while_a_stream_goes_on(
    shared: Shared, recall_steps: SlowSteps
) -> None:
    long = BODY | {"stream": True, "max_tokens": 4000}
    with (
        shared.client("known") as client,
        recall_steps.within(),
        client.stream("POST", "/v1/completions", json=long) as answer,
    ):
        lines = answer.iter_lines()
        next(lines)
        replace_file(shared.files / "ca", shared.made["clients"].cert)
        shared.wait_for_log("TLS: the certificate of ")
        with shared.client("new") as newcomer:
            assert newcomer.get("/health").status_code == 200
        with pytest.raises(httpx.TransportError), shared.client("known") as late:
            late.get("/health")
        assert [line for line in (next(lines) for _ in range(6)) if line.startswith("data: {")]
