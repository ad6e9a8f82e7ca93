"""`plait chat`: talk to a running server in the terminal."""

from __future__ import annotations

import ipaddress
import readline
from collections.abc import Iterator

import httpx
import msgspec
from plait_proto import UNDECODABLE, ExitCode

from plait.errors import DONE, StartError

Message = dict[str, str]
TIMEOUT = httpx.Timeout(10.0, read=600.0)
"""A request may wait in the server's queue."""
_NOT_OPENAI = "the response is not that of an OpenAI server; check --url"


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta


class _ErrorBody(msgspec.Struct):
    message: str


class _Event(msgspec.Struct):
    """A chunk of a streamed chat, or the error that ends it."""

    choices: list[_Choice] = []
    error: _ErrorBody | None = None


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


class AnswerError(Exception):
    """The server rejected the request or broke off; the message is its own."""


class Server:
    """Client of a running server."""

    def __init__(self, url: str, key: str | None, temperature: float | None) -> None:
        headers = {"Authorization": f"Bearer {key}"} if key is not None else {}
        self._temperature = temperature
        base_url = url.rstrip("/").removesuffix("/v1")
        # A configured proxy does not reach servers on this machine.
        trust_env = not _is_on_this_machine(base_url)
        self._client = httpx.Client(base_url=base_url, headers=headers, timeout=TIMEOUT, trust_env=trust_env)

    def model(self) -> str:
        """Id of the first model; raises `AnswerError` or `httpx.HTTPError`."""
        response = self._client.get("/v1/models")
        if response.status_code != 200:
            raise AnswerError(_message(response.content))
        try:
            return msgspec.json.decode(response.content, type=_Models).data[0].id
        except (*UNDECODABLE, IndexError):
            raise AnswerError(_NOT_OPENAI) from None

    def answer(self, model: str, messages: list[Message]) -> Iterator[str]:
        """Stream the text of the next answer; raises `AnswerError` or `httpx.HTTPError`."""
        body = {"model": model, "messages": messages, "temperature": self._temperature, "stream": True}
        with self._client.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                raise AnswerError(_message(response.read()))
            for line in response.iter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    yield _parse_delta(line.removeprefix("data: "))


def _is_on_this_machine(url: str) -> bool:
    host = httpx.URL(url).host.removesuffix(".")
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    return address.is_loopback or address.is_unspecified


def _parse_delta(data: str) -> str:
    try:
        event = msgspec.json.decode(data, type=_Event)
    except UNDECODABLE:
        raise AnswerError(_NOT_OPENAI) from None
    if event.error is not None:
        raise AnswerError(event.error.message)
    return "".join(choice.delta.content or "" for choice in event.choices)


def _message(body: bytes) -> str:
    try:
        error = msgspec.json.decode(body, type=_Event).error
    except UNDECODABLE:
        error = None
    return error.message if error is not None else _NOT_OPENAI


def chat(url: str, key: str | None, temperature: float | None) -> int:
    """Chat until Ctrl-D; the exit code. With None the server chooses the temperature.

    Raises `StartError` if no server answers.
    """
    try:
        server = Server(url, key, temperature)
        model = server.model()
    # httpx raises ValueError or ImportError for a proxy that it cannot use.
    except (httpx.HTTPError, httpx.InvalidURL, AnswerError, ValueError, ImportError) as error:
        advice = "start one with `plait serve`, or name another with --url"
        raise StartError(f"no server at {url}: {error}; {advice}", ExitCode.SETTINGS) from error
    print(f"{model} at {url}. Ctrl-C stops an answer, Ctrl-D quits.")
    _converse(server, model)
    return DONE


def _converse(server: Server, model: str) -> None:
    readline.set_auto_history(True)
    messages: list[Message] = []
    while (said := _ask()) is not None:
        if said:
            messages.append({"role": "user", "content": said})
            _reply(server, model, messages)


def _ask() -> str | None:
    """The next line, an empty one after Ctrl-C, None after Ctrl-D."""
    try:
        said = input("> ").strip()
        return said.encode(errors="replace").decode()  # input() turns invalid UTF-8 into lone surrogates
    except KeyboardInterrupt:
        print()
        return ""
    except EOFError:
        print()
        return None


def _reply(server: Server, model: str, messages: list[Message]) -> None:
    """Print the answer and add it to `messages`. A question without an answer is removed."""
    said = ""
    try:
        for piece in server.answer(model, messages):
            print(piece, end="", flush=True)
            said += piece
    except KeyboardInterrupt:
        print(" [stopped]", end="")
    except (AnswerError, httpx.HTTPError) as error:
        print(f"[the answer failed: {error}]", end="")
    print()
    if said:
        messages.append({"role": "assistant", "content": said})
    else:
        messages.pop()
