"""Ready-made loads by which servers are commonly compared."""

from __future__ import annotations

import math

import msgspec


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """Lengths, and the cases to measure: concurrencies of a closed loop, or rates of an open one."""

    input_len: str
    output_len: str
    streams: tuple[int, ...] = ()
    per_stream: int = 4
    """Requests of each stream of a closed loop."""
    rates: tuple[float, ...] = ()
    num_prompts: int = 100
    """Requests of each rate."""
    cap: int | None = None
    num_prefixes: int = 0
    prefix_len: int = 0


PROFILES = {
    # Long prompts with a heavy tail, short outputs: where mixed batching matters most.
    "prefill-heavy": Profile(
        input_len="lognormal:mean=12000,p99=100000,max=120000",
        output_len="ratio:0.01",
        rates=(0.1, 0.2, 0.3, 0.4, 0.5),
    ),
    "decode-heavy": Profile(
        input_len="lognormal:mean=5000,p99=20000,max=32000",
        output_len="lognormal:mean=500,p99=2000,max=4000",
        rates=(2.0, 4.0, 6.0, 8.0, 10.0),
        num_prompts=200,
    ),
    "mla-backends": Profile(input_len="1024", output_len="8192", streams=(1, 512), per_stream=2),
    "sonnet": Profile(
        input_len="1024", output_len="128", rates=(10.0,), cap=32, num_prompts=100, num_prefixes=1, prefix_len=200
    ),
    "chat": Profile(input_len="128", output_len="128", streams=(1, 64, 256)),
}
FEWEST_PROMPTS = 8
"""Least requests of a case of a scaled profile."""


def scaled(profile: Profile, scale: float) -> Profile:
    """The profile with fewer streams and requests. Lengths are scaled when they are sampled.

    Rates stay: a rate of shorter requests is already less work.
    """
    streams = dict.fromkeys(math.ceil(num * scale) for num in profile.streams)
    return msgspec.structs.replace(
        profile,
        streams=tuple(streams),
        num_prompts=max(FEWEST_PROMPTS, math.ceil(profile.num_prompts * scale)),
        cap=math.ceil(profile.cap * scale) if profile.cap is not None else None,
    )
