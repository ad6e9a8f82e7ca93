"""The timeline of each answer of a mock server, fixed to the microsecond before it begins."""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Literal, NamedTuple

Failure = Literal["none", "http-500", "http-429", "error-event", "close", "hang"]


@dataclass(frozen=True, slots=True)
class Timing:
    """What every answer of a mock server is like; times in seconds, 0 counts as never."""

    ttft: float = 0.02
    itl: float = 0.01
    jitter: float = 0.0
    """Each gap is up to that much shorter or longer, at random."""
    stall_at: int = 0
    """The chunk before which every answer stalls."""
    stall: float = 2.0
    tokens_per_chunk: int = 1
    cut: float = 0.0
    """Chunks come in two pieces, cut in the middle of a line and that far apart."""
    slots: int = 0
    """Answers that run at a time; others wait."""
    fail_every: int = 0
    """Every so many requests one fails: the last of each count."""
    failure: Failure = "none"
    tells: Literal["running-usage", "token-ids", "usage", "nothing"] = "token-ids"


class Moment(NamedTuple):
    """A chunk of an answer: seconds since the answer began to run, and the tokens in it."""

    offset: float
    num_tokens: int


def moments(timing: Timing, num_tokens: int, seed: int) -> Iterator[Moment]:
    """The timeline of an answer."""
    rng = random.Random(seed)
    offset, sent, chunk = timing.ttft, 0, 0
    while sent < num_tokens:
        if timing.stall_at and chunk == timing.stall_at:
            offset += timing.stall
        count = min(timing.tokens_per_chunk, num_tokens - sent)
        yield Moment(offset, count)
        sent, chunk = sent + count, chunk + 1
        offset += timing.itl + rng.uniform(-timing.jitter, timing.jitter)


def flags(timing: Timing) -> list[str]:
    """A timing as the mock's command line."""
    return [f"--{field.name.replace('_', '-')}={getattr(timing, field.name)}" for field in fields(Timing)]


def read_flags(words: list[str]) -> Timing:
    """A timing from the mock's command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    for field in fields(Timing):
        kind = type(field.default)
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=kind, default=field.default)
    return Timing(**vars(parser.parse_args(words)))
