"""`plait chat` where what it is given, or the server's answer, is not what it should be."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from plait.cli import run
from plait_proto import ExitCode


class NoOpenAi(BaseHTTPRequestHandler):
    """A server that answers everything with 200 and its `answer`."""

    answer = b""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.answer)

    def log_message(self, *_: object) -> None:
        """Write no log."""


class OneModel(NoOpenAi):
    """One that lists a model, refuses nothing and says `asked`, what it was sent last."""

    answer = b'{"data":[{"id":"tiny"}]}'
    asked = b""

    def do_POST(self) -> None:
        type(self).asked = self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"data: <html>\n\n")


@pytest.fixture
def server() -> Iterator[HTTPServer]:
    with HTTPServer(("127.0.0.1", 0), NoOpenAi) as listening:
        thread = threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield listening
        listening.shutdown()
        thread.join()


def chat(server: HTTPServer) -> int:
    return run(["chat", "--url", f"http://127.0.0.1:{server.server_port}"])


@pytest.mark.parametrize("answer", [b"<html>", b"\xff", b"{}", b'{"data":[]}'])
def test_a_server_that_is_not_openais_is_reported_in_one_line(
    server: HTTPServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], answer: bytes
) -> None:
    monkeypatch.setattr(NoOpenAi, "answer", answer)
    assert chat(server) == ExitCode.SETTINGS
    assert "check --url" in capsys.readouterr().err


def test_bytes_that_are_no_utf8_are_sent_as_question_marks_and_a_broken_answer_is_reported(
    server: HTTPServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server.RequestHandlerClass = OneModel
    monkeypatch.setattr("sys.stdin", io.StringIO("a\udcffb\n"))
    assert chat(server) == 0
    assert b'"a?b"' in OneModel.asked
    assert "[the answer failed: the response is not that of an OpenAI server" in capsys.readouterr().out


@pytest.mark.parametrize("proxy", ["http://127.0.0.1:1", "socks5://127.0.0.1:1"])
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0"])
def test_a_server_on_this_machine_is_asked_past_its_proxy(
    server: HTTPServer, monkeypatch: pytest.MonkeyPatch, host: str, proxy: str
) -> None:
    server.RequestHandlerClass = OneModel
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ALL_PROXY", proxy)
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert run(["chat", "--url", f"http://{host}:{server.server_port}"]) == 0


@pytest.mark.parametrize(("url", "proxy"), [("http://[", ""), ("http://192.0.2.1:1", "nonsense://here:1")])
def test_an_address_or_a_proxy_that_makes_no_sense_is_reported_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], url: str, proxy: str
) -> None:
    monkeypatch.setenv("ALL_PROXY", proxy)
    assert run(["chat", "--url", url]) == ExitCode.SETTINGS
    assert f"no server at {url}: " in capsys.readouterr().err


@pytest.mark.parametrize("temperature", ["nan", "inf", "-1", "100.1"])
def test_a_temperature_out_of_range_is_refused_at_once(temperature: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["chat", f"--temperature={temperature}"]) == ExitCode.SETTINGS
    assert "from 0 to 100" in capsys.readouterr().err
