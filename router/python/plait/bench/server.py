"""The server under load: its address, its model, and how its tokens can be counted."""

from __future__ import annotations

import socket
import ssl
from typing import NamedTuple
from urllib.parse import SplitResult, urlsplit

import httpx
import msgspec
from plait_proto import UNDECODABLE, ExitCode

from plait.bench.messages import Counting, Setup
from plait.bench.response import Response
from plait.bench.settings import ServerSettings
from plait.errors import SettingsError, StartError

CONNECT_SECONDS = 10.0
PROBE_TOKENS = 8
LONGER_PROBES = (32, 128)
"""Tokens of further probes: a busy server may send a short answer in a single chunk."""
# Cheapest for the server first: with token ids it also echoes the prompt's.
_ASKING: dict[Counting, dict[str, object]] = {
    "running-usage": {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    "token-ids": {"stream_options": {"include_usage": True}, "return_token_ids": True},
    "usage": {"stream_options": {"include_usage": True}},
    "chunks": {},
}


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


class Probed(NamedTuple):
    """The response to a probe."""

    response: Response
    has_token_ids: bool


class Server:
    """One server, connected and asked for its models. Raises `StartError` if it is no OpenAI server."""

    def __init__(
        self, url: str, position: int, settings: ServerSettings, key: str | None, timeout_seconds: float
    ) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self.position = position
        self._settings = settings
        self._parts = _split(self.url)
        self._key = key
        self._timeout_seconds = timeout_seconds
        self._address = self._reach()
        self.counting: Counting = "chunks"
        headers = {"Authorization": f"Bearer {key}"} if key is not None else {}
        timeout = httpx.Timeout(timeout_seconds, connect=CONNECT_SECONDS)
        # As the client processes do: no proxy, and the system's certificates.
        self._http = httpx.Client(
            base_url=self.url, headers=headers, timeout=timeout, trust_env=False, verify=ssl.create_default_context()
        )
        self.model = self._choose_model()

    @property
    def streams(self) -> bool:
        """Whether responses are streamed."""
        return self._settings.stream

    @property
    def path(self) -> str:
        """URL path of the route under load."""
        route = "chat/completions" if self._settings.api == "chat" else "completions"
        return f"{self._parts.path}/v1/{route}"

    def setup(self) -> Setup:
        """The setup of the client processes."""
        headers = {
            "Host": self._parts.netloc,
            "Content-Type": "application/json",
            "Accept": "text/event-stream" if self._settings.stream else "application/json",
            "User-Agent": "plait-bench",
        }
        if self._key is not None:
            headers["Authorization"] = f"Bearer {self._key}"
        lines = [f"POST {self.path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
        return Setup(
            address=self._address[0],
            port=self._address[1],
            tls_name=self._parts.hostname if self._parts.scheme == "https" else None,
            head="\r\n".join([*lines, "Content-Length: "]).encode(),
            streamed=self._settings.stream,
            counting=self.counting,
            timeout_seconds=self._timeout_seconds,
        )

    def body(self, prompt: bytes, output_len: int) -> bytes:
        """A request's body; `prompt` is the JSON value of `prompt` or `messages`."""
        return self._body(prompt, output_len, self.counting)

    def learn_counting(self, prompt: bytes) -> None:
        """Probe for the best way to count tokens. Raises `StartError` if the server does not answer."""
        rungs: list[Counting] = list(_ASKING) if self._settings.stream else ["usage", "chunks"]
        if self._settings.count_by != "auto":
            rungs = [self._settings.count_by]
        for counting in rungs:
            probed = self._probe_chunks(prompt, counting)
            if _supports_counting(probed, counting):
                self.counting = counting
                return
        raise StartError(self._refusal(probed.response), ExitCode.SETTINGS)

    def num_prompt_tokens(self, prompt: bytes) -> int | None:
        """Length of a prompt from the server's usage; None if it sends none."""
        usage = self._probe(prompt, self.counting, output_len=1).response.usage
        return usage.prompt_tokens if usage is not None else None

    def warm_up(self, prompt: bytes, output_len: int) -> None:
        """Send one request that is not measured. Failures are ignored."""
        self._probe(prompt, self.counting, output_len)

    def _body(self, prompt: bytes, output_len: int, counting: Counting) -> bytes:
        settings = self._settings
        fields: dict[str, object] = {
            "model": self.model,
            "messages" if settings.api == "chat" else "prompt": msgspec.Raw(prompt),
            "max_tokens": output_len,
            "temperature": settings.temperature,
        }
        if settings.top_p < 1:
            fields["top_p"] = settings.top_p
        if settings.ignore_eos:
            fields["ignore_eos"] = True
        if settings.stream:
            fields |= {"stream": True, **_ASKING[counting]}
        return msgspec.json.encode(fields)

    def _reach(self) -> tuple[str, int]:
        """Connect once and return the peer's address, so that names are not resolved under load."""
        port = self._parts.port or (443 if self._parts.scheme == "https" else 80)
        try:
            with socket.create_connection((self._parts.hostname, port), CONNECT_SECONDS) as reached:
                address, port, *_ = reached.getpeername()
                return address, port
        except (OSError, UnicodeError) as error:  # UnicodeError: the name is not valid IDNA
            raise self._no_server(str(error)) from error

    def _no_server(self, why: str) -> StartError:
        advice = "start one with `plait serve`, or name another with --url or --against"
        return StartError(f"no OpenAI server at {self.url}: {why}; {advice}", ExitCode.SETTINGS)

    def _choose_model(self) -> str:
        served = self._models()
        wanted = self._settings.model
        if wanted is None:
            return served[0]
        if wanted not in served:
            raise SettingsError(f"--model is {wanted!r}; {self.url} serves: {', '.join(served[:20])}")
        return wanted

    def _models(self) -> list[str]:
        try:
            response = self._http.get("/v1/models", timeout=CONNECT_SECONDS)
        except httpx.HTTPError as error:
            raise self._no_server(str(error)) from error
        if response.status_code != 200:
            raise self._no_server(f"GET /v1/models returns {response.status_code}: {response.text[:200]}")
        try:
            served = [model.id for model in msgspec.json.decode(response.content, type=_Models).data]
        except UNDECODABLE:
            raise self._no_server(f"GET /v1/models returns no list of models: {response.content[:80]!r}") from None
        if not served:
            raise self._no_server("its list of models is empty")
        return served

    def _probe_chunks(self, prompt: bytes, counting: Counting) -> Probed:
        """Probe again while a running usage comes in one chunk, which is no different from a usage at the end."""
        probed = self._probe(prompt, counting)
        for output_len in LONGER_PROBES:
            if counting != "running-usage" or len(probed.response.counts) != 1:
                break
            probed = self._probe(prompt, counting, output_len)
        return probed

    def _probe(self, prompt: bytes, counting: Counting, output_len: int = PROBE_TOKENS) -> Probed:
        answer, has_token_ids = Response(self._settings.stream, counting), False
        headers = {"Content-Type": "application/json"}
        body = self._body(prompt, output_len, counting)
        url = self.path.removeprefix(self._parts.path)
        try:
            with self._http.stream("POST", url, content=body, headers=headers) as response:
                answer.status = response.status_code
                for piece in response.iter_bytes():
                    has_token_ids = has_token_ids or b'"token_ids":[' in piece or b'"token_ids": [' in piece
                    answer.feed(0.0, piece)
            answer.finish()
        except httpx.HTTPError as error:
            answer.fail("closed before its end", str(error))
        return Probed(answer, has_token_ids)

    def _refusal(self, answer: Response) -> str:
        if answer.failure is None:
            return (
                f"{self.url} does not support --count-by {self._settings.count_by}; leave --count-by out to use the "
                "best that it supports"
            )
        return (
            f"{self.url} fails on a first request: {answer.failure}: {answer.detail}; "
            "--token-range, --no-ignore-eos, --no-stream, --api and --model change what is sent"
        )


def _split(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        is_whole = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        is_whole = False
    if not is_whole:
        raise SettingsError(f"--url is {url!r}; allowed: http://HOST:PORT or https://HOST:PORT")
    return parts


def _supports_counting(probed: Probed, counting: Counting) -> bool:
    """Whether the response has what was asked for. Servers often ignore unknown fields."""
    answer = probed.response
    if answer.failure is not None:
        return False
    total = answer.usage.completion_tokens if answer.usage is not None else None
    match counting:
        case "running-usage":
            return total is not None and len(answer.counts) > 1 and sum(answer.counts) == total
        case "token-ids":
            return probed.has_token_ids and sum(answer.counts) == total
        case "usage":
            return total is not None
    return True
