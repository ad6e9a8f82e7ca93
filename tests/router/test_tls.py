"""TLS of the front door: files that cannot be used, and streams over it."""

from __future__ import annotations

import ssl
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from plait.cli import run
from plait.errors import SettingsError
from plait.http.tls import TlsFiles, tls_files
from plait.tls_settings import TlsSettings
from plait_testing.certificates import Certificate, authority, replace_file, signed
from plait_testing.front_door import CHAT, Asking, Door, open_door
from plait_testing.in_memory_engine import LAST, record


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Certificate]:
    folder = tmp_path_factory.mktemp("certificates")
    root = authority(folder, "root")
    return {"root": root, "server": signed(root, folder, "server"), "other": signed(root, folder, "other")} | {
        "expired": signed(root, folder, "expired", days=-1)
    }


@pytest.fixture
def server(made: dict[str, Certificate], tmp_path: Path) -> Certificate:
    """The server's own copy, which a test may change."""
    copy = Certificate(tmp_path / "server.crt", tmp_path / "server.key")
    replace_file(copy.cert, made["server"].cert)
    replace_file(copy.key, made["server"].key)
    return copy


@pytest.fixture
def files(server: Certificate) -> TlsFiles:
    return TlsFiles(server.cert, server.key, None)


@pytest.fixture
def door(files: TlsFiles) -> Iterator[Door]:
    yield from open_door(None, _NoSockets(), tls=files.listening())


class _NoSockets:
    """A writer thread that must see nothing of a connection with TLS."""

    def announce(self, stream: int, max_unsent_bytes: int) -> None:
        raise AssertionError(stream)

    def hand_over(self, stream: int, socket: int, write_seconds: float) -> None:
        raise AssertionError(stream)

    def release(self, stream: int) -> None:
        """Of every stream that ends early."""

    def comment(self, comment: bytes) -> None:
        raise AssertionError(comment)


def trusting(root: Certificate) -> httpx.Client:
    return httpx.Client(verify=ssl.create_default_context(cafile=root.cert), timeout=60)


def test_streams_and_whole_answers_come_over_tls_from_python(door: Door, made: dict[str, Certificate]) -> None:
    with trusting(made["root"]) as client:
        asking = Asking(door, CHAT, client, stream=True)
        stream = door.wait_for(1)
        door.engine.send(record(stream, b"data: 1\n\n"))
        door.engine.send(record(stream, b"data: [DONE]\n\n", LAST))
        assert asking.answer().text == "data: 1\n\ndata: [DONE]\n\n"
        asking = Asking(door, CHAT, client)
        door.engine.send(record(door.wait_for(2), b"{}", LAST))
        assert asking.answer().json() == {}
        assert client.get(door.url + "/health").status_code == 200


def test_a_client_without_tls_gets_nothing(door: Door) -> None:
    with pytest.raises(httpx.TransportError):
        httpx.get(door.url.replace("https", "http") + "/health", timeout=60)


def shown_certificate(door: Door) -> str:
    return ssl.get_server_certificate(("127.0.0.1", door.port), timeout=60)


def test_a_renewed_certificate_is_shown_to_new_connections_while_a_stream_goes_on(
    door: Door, files: TlsFiles, server: Certificate, made: dict[str, Certificate], capfd: pytest.CaptureFixture[str]
) -> None:
    with trusting(made["root"]) as client:
        asking = Asking(door, CHAT, client, stream=True)
        stream = door.wait_for(1)
        door.engine.send(record(stream, b"data: 1\n\n"))
        replace_file(server.cert, made["other"].cert)
        poll_until_settled(files)  # the key of the one before does not fit
        assert "TLS: kept the files that were read before, for --ssl-keyfile" in capfd.readouterr().err
        assert shown_certificate(door) == pem(made["server"])
        replace_file(server.key, made["other"].key)
        poll_until_settled(files)
        assert capfd.readouterr().err == f"TLS: the certificate of {server.cert}, which has changed\n"
        assert shown_certificate(door) == pem(made["other"])
        door.engine.send(record(stream, b"data: 2\n\n", LAST))
        assert asking.answer().text == "data: 1\n\ndata: 2\n\n"


def poll_until_settled(files: TlsFiles) -> None:
    files.poll()
    files.poll()


def pem(certificate: Certificate) -> str:
    return ssl.DER_cert_to_PEM_cert(ssl.PEM_cert_to_DER_cert(certificate.cert.read_text()))


Spoiling = Callable[[Certificate, dict[str, Certificate]], object]


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda own, made: own.cert.unlink(), r"--ssl-certfile .* cannot be read: No such file"),
        (lambda own, made: own.cert.write_text("rubbish"), r"--ssl-certfile .* holds no certificate"),
        (lambda own, made: own.cert.write_text(broken(own.cert)), r"--ssl-certfile .* cannot be used"),
        (lambda own, made: replace_both(own, made["expired"]), r"--ssl-certfile .* has expired; renew it"),
        (lambda own, made: replace_file(own.key, made["other"].key), r"is not the key of the first certificate"),
        (lambda own, made: replace_file(own.key, own.cert), r"--ssl-keyfile .* holds no private key"),
        (lambda own, made: own.key.chmod(0o644), r"--ssl-keyfile .* is readable by other users"),
        (lambda own, made: encrypt(own.key), r"--ssl-keyfile .* is encrypted"),
        (lambda own, made: own.key.write_bytes(bytes(1 << 21)), r"--ssl-keyfile .* has over 1048576 bytes"),
    ],
)
def test_files_that_cannot_be_used_are_refused_with_what_to_do(
    server: Certificate, made: dict[str, Certificate], spoil: Spoiling, said: str
) -> None:
    spoil(server, made)
    with pytest.raises(SettingsError, match=said):
        tls_files(TlsSettings(ssl_certfile=str(server.cert), ssl_keyfile=str(server.key)))


def broken(path: Path) -> str:
    lines = path.read_text().splitlines()
    return "\n".join([lines[0], *reversed(lines[1:-1]), lines[-1]]) + "\n"


def replace_both(own: Certificate, by: Certificate) -> None:
    replace_file(own.cert, by.cert)
    replace_file(own.key, by.key)


def encrypt(key: Path) -> None:
    words = ("openssl", "pkey", "-in", key, "-aes256", "-passout", "pass:x")
    key.write_bytes(subprocess.run(words, check=True, capture_output=True).stdout)


def test_authorities_must_be_some(server: Certificate, made: dict[str, Certificate]) -> None:
    with pytest.raises(SettingsError, match=r"--ssl-ca-certs .* holds no authority's certificate"):
        TlsFiles(server.cert, server.key, made["other"].cert)


def test_one_file_may_have_certificate_and_key(server: Certificate) -> None:
    server.key.write_text(server.key.read_text() + server.cert.read_text())
    assert tls_files(TlsSettings(ssl_certfile=str(server.key))) is not None


def test_a_server_without_a_certificate_does_not_start(server: Certificate, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["serve", "/no/such/model", "--ssl-keyfile", str(server.key)]) == 2
    assert "--ssl-keyfile is given without --ssl-certfile" in capsys.readouterr().err
