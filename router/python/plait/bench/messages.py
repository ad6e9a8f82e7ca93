"""What passes between the bench and its client processes: msgpack, each message behind its length.

All times are seconds of CLOCK_MONOTONIC, which is one clock for all processes of a machine.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator
from typing import Literal, TypeAlias

import msgspec

Counting = Literal["token-ids", "running-usage", "usage", "chunks"]
"""What tells how many tokens a chunk brings; `usage` tells the total alone."""

NO_SOCKET = "client has no socket"
"""The kind of a failure that is the client's own."""

_LENGTH = struct.Struct("<I")


class Setup(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Where and how a client sends."""

    address: str
    """An IP address: names were looked up before."""
    port: int
    tls_name: str | None
    """The server's name in its certificate; None sends in the clear."""
    head: bytes
    """Request line and headers, up to the length of the body."""
    streamed: bool
    counting: Counting
    timeout_seconds: float


class Job(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """A request that will be sent when its `Go` comes."""

    index: int
    body: bytes
    keeps_ids: bool = False
    """Its answer's token ids are wanted."""


class Begin(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """All jobs are there: answer `Ready` and watch the time."""


class Go(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Send a request now."""

    index: int
    intended: float | None
    """From when its latency counts; None: from when the client takes it up (closed loop)."""
    due: float | None
    """When it could be sent at the earliest: what comes later is the client's fault. None: a stream's first request."""


class Finish(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The run is over: give up what is under way and answer with a `Report`."""


class Ready(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The client waits for requests."""


class Outcome(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """What became of a request."""

    index: int
    intended: float
    due: float
    taken: float
    """When the client took it up; a new connection, where it needs one, comes after."""
    ended: float
    """When the last byte of its body came; of a failed request, when it had failed."""
    freed: float
    """When nothing more of it was to come: its stream and its slot are free."""
    failure: str | None
    """Kind of the failure; failures are counted by it."""
    detail: str
    """What the server or the system said of the failure."""
    finish_reason: str | None
    num_prompt_tokens: int | None
    """By the server's usage, as is `num_output_tokens`."""
    num_output_tokens: int | None
    times: bytes
    """float64 each: when the chunks with tokens arrived."""
    counts: bytes
    """uint32 each: the tokens in those chunks."""
    token_ids: list[int] | None = None
    """The answer, where its ids were wanted."""

    @property
    def arrivals(self) -> array[float]:
        """When the chunks with tokens arrived."""
        return array("d", self.times)

    @property
    def tokens(self) -> array[int]:
        """The tokens in those chunks."""
        return array("I", self.counts)


class Report(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """How a client process itself fared."""

    lag_p99: float
    """Seconds by which its event loop was late for a timer."""
    lag_max: float
    cpu_share: float
    """Of one core."""
    num_resent: int
    """Requests sent again because the server had closed an idle connection."""
    in_flight: list[float] = []
    """When the client took up each request that had not ended."""


ToClient: TypeAlias = Setup | Job | Begin | Go | Finish
FromClient: TypeAlias = Ready | Outcome | Report


def frame(message: ToClient | FromClient) -> bytes:
    """A message as it travels."""
    packed = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(packed)) + packed


class Frames:
    """Cuts a byte stream back into messages."""

    def __init__(self) -> None:
        self._bytes = bytearray()
        self._decoder = msgspec.msgpack.Decoder(FromClient)

    def feed(self, data: bytes) -> Iterator[FromClient]:
        """The messages that are complete with `data`."""
        self._bytes += data
        start = 0
        while len(self._bytes) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._bytes, start)
            if len(self._bytes) - start - _LENGTH.size < length:
                break
            start += _LENGTH.size
            yield self._decoder.decode(self._bytes[start : start + length])
            start += length
        del self._bytes[:start]


LENGTH_BYTES = _LENGTH.size


def frame_length(packed: bytes) -> int:
    """The length that stands before a message."""
    (length,) = _LENGTH.unpack(packed)
    return int(length)
