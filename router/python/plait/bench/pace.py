"""The pace of requests: closed loop, open loop at a rate, or the timestamps of a trace."""

from __future__ import annotations

import random
from itertools import accumulate
from typing import TypeAlias

import msgspec


class ClosedLoop(msgspec.Struct, frozen=True, tag="closed"):
    """Closed loop: each of `num_streams` streams sends its next request when its last one ended."""

    num_streams: int

    @property
    def cap(self) -> int | None:
        """Most requests in flight at a time."""
        return self.num_streams

    @property
    def words(self) -> str:
        """For people."""
        return f"closed loop, {self.num_streams} stream{'s' if self.num_streams > 1 else ''}"


class OpenLoop(msgspec.Struct, frozen=True, tag="open"):
    """Open loop: requests are due at a rate, independent of the server."""

    rate: float
    """Requests a second."""
    burstiness: float | None
    """Shape of the gamma distribution of the gaps: 1 is Poisson, less is bursty. None: all gaps are equal."""
    cap: int | None

    @property
    def words(self) -> str:
        """For people."""
        kinds = {None: "fixed gaps", 1.0: "Poisson"}
        kind = kinds.get(self.burstiness, f"gamma gaps of burstiness {self.burstiness}")
        return f"open loop, {self.rate:g} requests/s, {kind}" + _describe_cap(self.cap)


class TraceReplay(msgspec.Struct, frozen=True, tag="trace"):
    """Open loop: requests are due at the trace's timestamps, `speed` times as fast."""

    speed: float
    cap: int | None

    @property
    def words(self) -> str:
        """For people."""
        return f"open loop, the trace's clock at {self.speed:g}x" + _describe_cap(self.cap)


Pace: TypeAlias = ClosedLoop | OpenLoop | TraceReplay


def _describe_cap(cap: int | None) -> str:
    return "" if cap is None else f", at most {cap} at a time"


def due_offsets(pace: Pace, num: int, stamps: list[float] | None, rng: random.Random) -> list[float]:
    """When each of `num` requests is due, in seconds after the first. Those of a closed loop are all due at once.

    Gaps are scaled to a mean of exactly 1 / rate, so that every seed offers the same load. `stamps` holds a trace's
    timestamps in seconds.
    """
    if isinstance(pace, ClosedLoop) or num == 0:
        return [0.0] * num
    if isinstance(pace, TraceReplay):
        if stamps is None:
            raise ValueError("the load is not a trace: it has no timestamps to replay")
        return [(stamp - stamps[0]) / pace.speed for stamp in stamps[:num]]
    gaps = _shares_of_the_longest([_gap(pace.burstiness, rng) for _ in range(num - 1)])
    stretch = len(gaps) / pace.rate / sum(gaps) if gaps else 1.0
    return [0.0, *(stretch * offset for offset in accumulate(gaps))]


def _shares_of_the_longest(gaps: list[float]) -> list[float]:
    """Gaps over the longest one. Very bursty gaps may be too small to divide by; if all are 0, they are equal."""
    longest = max(gaps, default=0.0)
    return [gap / longest if longest else 1.0 for gap in gaps]


def _gap(burstiness: float | None, rng: random.Random) -> float:
    return 1.0 if burstiness is None else rng.gammavariate(burstiness, 1.0)
