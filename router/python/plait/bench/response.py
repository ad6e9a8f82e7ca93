"""One response as its bytes arrive: server-sent events, or a whole body."""

from __future__ import annotations

from array import array

import msgspec
from plait_proto import UNDECODABLE

from plait.bench.messages import Counting
from plait.bench.prompts import MAX_TOKEN_ID

MAX_EVENT_BYTES = 32 << 20
"""Enough for the echo of a prompt of four million token ids."""
MAX_DETAIL_CHARS = 300
SHOWN_BYTES = 100
"""Bytes of an unreadable body or event that an error shows."""
NO_ANSWER = "no OpenAI answer"


class _Text(msgspec.Struct, gc=False):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(msgspec.Struct, gc=False):
    text: str | None = None
    delta: _Text | None = None
    message: _Text | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None


class _Usage(msgspec.Struct, gc=False):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Error(msgspec.Struct):
    message: str = ""


class _Event(msgspec.Struct, gc=False):
    """A chunk, a whole response or an error. Other fields are skipped, not decoded."""

    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: _Error | str | None = None
    kind: str | None = msgspec.field(default=None, name="object")
    message: str | None = None
    """Message of an event that is itself an error: its `object` is `error`."""

    @property
    def error_words(self) -> str | None:
        """The error's message; None if the event is no error."""
        if isinstance(self.error, _Error):
            return self.error.message
        return (self.message or "") if self.error is None and self.kind == "error" else self.error


_decode = msgspec.json.Decoder(_Event).decode


class Response:
    """What has arrived of a response so far."""

    __slots__ = (
        "_begin",
        "_broken",
        "_counting",
        "_num_events",
        "_rest",
        "_streamed",
        "_token_ids",
        "counts",
        "detail",
        "ended",
        "failure",
        "finish_reason",
        "is_done",
        "status",
        "times",
        "usage",
    )

    def __init__(self, streamed: bool, counting: Counting, keeps_ids: bool = False) -> None:
        self._streamed = streamed
        self._counting = counting
        self._num_events = 0
        self._rest = bytearray()
        """The unfinished line of a stream, or all of a whole body so far."""
        self._begin = b""
        """The body's first bytes."""
        self._broken = bytearray()
        """Lines of an event whose first line alone is not JSON."""
        self.status = 0
        self.times = array("d")
        self.counts = array("I")
        self._token_ids: list[int] | None = [] if keeps_ids else None
        self.usage: _Usage | None = None
        self.finish_reason: str | None = None
        self.is_done = False
        """The server sent `[DONE]`."""
        self.ended = 0.0
        self.failure: str | None = None
        self.detail = ""

    def feed(self, now: float, body: bytes) -> None:
        """Take bytes of the body that arrived at `now`. They may be cut anywhere."""
        self.ended = now
        if len(self._begin) < SHOWN_BYTES:
            self._begin += body[:SHOWN_BYTES]
        if self._streamed and self.status == 200 and b"\n" in body:
            *lines, rest = (self._rest + body).split(b"\n")
            self._rest = bytearray(rest)
            for line in lines:
                self._line(now, line)
        else:
            self._rest += body
        if len(self._rest) + len(self._broken) > MAX_EVENT_BYTES:
            self._rest.clear()
            self._broken.clear()
            self.fail(NO_ANSWER, f"an event or a body has over {MAX_EVENT_BYTES} bytes")

    def finish(self) -> None:
        """The body is complete."""
        if self.status != 200:
            self.fail(f"http {self.status}", _message(bytes(self._rest)))
            return
        if not self._streamed:
            self._event(self.ended, bytes(self._rest))
            self._end_event(self.ended)
            self.require_tokens()
            return
        self._line(self.ended, bytes(self._rest))
        self._end_event(self.ended)
        if self._num_events == 0:
            self.fail(NO_ANSWER, f"no event in its body: {self._begin[:SHOWN_BYTES]!r}")
        elif not self.is_done and self.finish_reason is None:
            self.fail("closed before its end", "the stream ended without a finish_reason and without [DONE]")
        self.require_tokens()

    def require_tokens(self) -> None:
        """Fail a response that ended well but brought no token, no finish_reason and no usage."""
        num_told = self.usage.completion_tokens if self.usage is not None else 0
        if not (self.times or self.finish_reason or num_told):
            self.fail("no answer", "200 without a token")

    def fail(self, kind: str, detail: str) -> None:
        """Record a failure; the first one counts."""
        if self.failure is None:
            self.failure, self.detail = kind, detail[:MAX_DETAIL_CHARS]

    @property
    def token_ids(self) -> list[int] | None:
        """The ids, if they are kept; None also if one of them is out of range."""
        ids = self._token_ids
        return ids if ids is not None and all(0 <= token <= MAX_TOKEN_ID for token in ids) else None

    @property
    def is_complete(self) -> bool:
        """Whether all text has arrived, whatever happens to the connection."""
        return self._streamed and (self.is_done or self.finish_reason is not None)

    def _line(self, now: float, line: bytes | bytearray) -> None:
        if line.startswith(b"data:"):
            data = line[5:]
            if self._broken:
                self._broken += b"\n" + data
            elif data and not data.isspace():
                self._num_events += 1
                self._event(now, data)
        elif self._broken and not line.strip():
            self._end_event(now)

    def _end_event(self, now: float) -> None:
        """Decode an event that spans several lines."""
        if self._broken:
            data = bytes(self._broken)
            self._broken.clear()
            self._event(now, data)
        if self._broken:
            self.fail(NO_ANSWER, f"no JSON of an answer: {bytes(self._broken[:SHOWN_BYTES])!r}")
            self._broken.clear()

    def _event(self, now: float, data: bytes | bytearray) -> None:
        if data.strip() == b"[DONE]":
            self.is_done = True
            return
        try:
            event = _decode(data)
        except UNDECODABLE:
            self._broken += data
            return
        if (words := event.error_words) is not None:
            self.fail("error event", words)
        elif not self._streamed and not event.choices:
            self.fail(NO_ANSWER, f"a body without choices: {bytes(data[:100])!r}")
        self._tokens(now, event)

    def _tokens(self, now: float, event: _Event) -> None:
        num = 0
        for choice in event.choices or ():
            self.finish_reason = choice.finish_reason or self.finish_reason
            num += _num_tokens(choice)
            if self._token_ids is not None:
                self._token_ids += choice.token_ids or ()
        if event.usage is not None:
            if self._counting == "running-usage":
                num = max(0, event.usage.completion_tokens - (self.usage.completion_tokens if self.usage else 0))
            self.usage = event.usage
        if num:
            self.times.append(now)
            self.counts.append(num)


def _num_tokens(choice: _Choice) -> int:
    if choice.token_ids is not None:
        return len(choice.token_ids)
    delta = choice.delta or choice.message
    if delta is not None:
        return 1 if delta.content or delta.reasoning_content or delta.reasoning else 0
    return 1 if choice.text else 0


def _message(body: bytes) -> str:
    """The message in an error's body."""
    try:
        words = _decode(body).error_words
    except UNDECODABLE:
        words = None
    return words if words is not None else body[:MAX_DETAIL_CHARS].decode(errors="replace")
