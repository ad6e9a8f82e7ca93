"""Messages between the benchmark and its client processes: length-prefixed msgpack.

All times are seconds of CLOCK_MONOTONIC, which all processes of a machine share.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator
from typing import Literal, TypeAlias

import msgspec

Counting = Literal["token-ids", "running-usage", "usage", "chunks"]
"""How the tokens of a chunk are counted; `usage` gives only the total."""

NO_SOCKET = "client has no socket"
"""Kind of a failure that is the client's own."""

_LENGTH = struct.Struct("<I")


class Setup(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Where and how a client sends."""

    address: str
    """An IP address: names are resolved before."""
    port: int
    tls_name: str | None
    """The server's name in its certificate; None sends without TLS."""
    head: bytes
    """Request line and headers, up to the value of Content-Length."""
    streamed: bool
    counting: Counting
    timeout_seconds: float


class Job(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """A request that is sent when its `Go` arrives."""

    index: int
    body: bytes
    keeps_ids: bool = False
    """Whether the outcome carries the token ids."""


class Begin(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """All jobs were sent: answer `Ready` and start to measure the event loop's lag."""


class Go(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Send a request now."""

    index: int
    intended: float | None
    """When its latency begins; None: when the client takes it up (closed loop)."""
    due: float | None
    """The earliest time at which it could be sent. Later is the client's lag. None: a stream's first request."""


class Finish(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The run is over: drop open requests and answer with a `Report`."""


class Ready(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The client waits for orders."""


class Outcome(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The end of a request."""

    index: int
    intended: float
    due: float
    taken: float
    """When the client took it up. A new connection, if it needs one, is opened after that."""
    ended: float
    """When the last byte of its body arrived, or when it failed."""
    freed: float
    """When its connection was free for the next request."""
    failure: str | None
    """Kind of the failure. Failures are counted by kind."""
    detail: str
    """The server's or the system's message."""
    finish_reason: str | None
    num_prompt_tokens: int | None
    """From the server's usage, as `num_output_tokens`."""
    num_output_tokens: int | None
    times: bytes
    """float64: arrival of each chunk with tokens."""
    counts: bytes
    """uint32: tokens of each of those chunks."""
    token_ids: list[int] | None = None
    """The output, if its ids were wanted."""

    @property
    def arrivals(self) -> array[float]:
        """Arrival of each chunk with tokens."""
        return array("d", self.times)

    @property
    def tokens(self) -> array[int]:
        """Tokens of each of those chunks."""
        return array("I", self.counts)


class Report(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """What a client process measured of itself."""

    lag_p99: float
    """Seconds by which its event loop was late for a timer, 99th percentile."""
    lag_max: float
    cpu_share: float
    """CPU time as a share of one core."""
    num_resent: int
    """Requests sent again because the server had closed an idle connection."""
    in_flight: list[float] = []
    """When the client took up each request that has not ended."""


ToClient: TypeAlias = Setup | Job | Begin | Go | Finish
FromClient: TypeAlias = Ready | Outcome | Report


def frame(message: ToClient | FromClient) -> bytes:
    """A message with its length before it."""
    packed = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(packed)) + packed


class Frames:
    """Splits a byte stream into messages."""

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
    """The length before a message, in bytes."""
    (length,) = _LENGTH.unpack(packed)
    return int(length)
