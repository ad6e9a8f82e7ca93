"""Settings of `plait bench`: each component's in one struct, the default beside its meaning."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from plait.bench.lengths import FORMS
from plait.settings import Seed, Setting

MAX_PROMPTS = 1_000_000
Count = Annotated[int, Meta(ge=1, le=MAX_PROMPTS)]
Streams = Annotated[int, Meta(ge=1, le=16_384)]
Rate = Annotated[float, Meta(gt=0, le=100_000)]
Seconds = Annotated[float, Meta(gt=0, le=86_400)]
Tokens = Annotated[int, Meta(ge=1, le=4_194_304)]


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Server."""

    url: Annotated[str, Setting("address of the server")] = "http://127.0.0.1:8000"
    model: Annotated[str | None, Setting("model id to ask for", unset="the first that the server lists")] = None
    api_key_file: Annotated[str | None, Setting("file whose first line is a key", unset="no key is sent")] = None
    api: Annotated[
        Literal["completions", "chat"],
        Setting("route: completions takes token ids, so lengths are exact; chat takes text sized by the usage told"),
    ] = "completions"
    stream: Annotated[bool, Setting("ask for streamed answers; whole ones have no first token")] = True
    temperature: Annotated[Annotated[float, Meta(ge=0, le=2)], Setting("of every request")] = 0.0
    top_p: Annotated[
        Annotated[float, Meta(gt=0, le=1)], Setting("of every request that is drawn; 1 takes every token")
    ] = 1.0
    ignore_eos: Annotated[bool, Setting("answers run to their full length")] = True
    count_by: Annotated[
        Literal["auto", "running-usage", "token-ids", "usage", "chunks"],
        Setting("what tells the tokens of a chunk; auto takes the first of these that the server gives"),
    ] = "auto"


class LoadSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Load."""

    profile: Annotated[
        Literal["prefill-heavy", "decode-heavy", "mla-backends", "sonnet", "chat"] | None,
        Setting("ready-made load; settings that are given besides go before its own", unset="none"),
    ] = None
    scale: Annotated[
        Annotated[float, Meta(gt=0, le=1)],
        Setting("shrinks lengths, and a profile's streams and requests, to fit a small machine"),
    ] = 1.0
    num_prompts: Annotated[
        Count | None,
        Setting("requests to send", unset="100, the profile's, the file's or all that --rate brings in --duration"),
    ] = None
    duration: Annotated[
        Seconds | None, Setting("seconds after which no request starts (open loop: is due)", unset="no limit")
    ] = None
    input_len: Annotated[str | None, Setting(f"prompt tokens: {FORMS}", unset="128 or the profile's")] = None
    output_len: Annotated[str | None, Setting("answer tokens, in the same forms", unset="128 or the profile's")] = None
    num_prefixes: Annotated[Annotated[int, Meta(ge=0, le=100_000)], Setting("prefixes that prompts share")] = 0
    prefix_len: Annotated[Tokens | None, Setting("tokens of each shared prefix, part of --input-len", unset="256")] = (
        None
    )
    trace: Annotated[str | None, Setting("recorded service: Azure's CSV or Mooncake's JSONL", unset="none")] = None
    prompts: Annotated[
        str | None, Setting("JSONL of prompts: `prompt` or `messages`, and `output_len`", unset="none")
    ] = None
    text: Annotated[str | None, Setting("text whose lines make the prompts", unset="random tokens")] = None
    token_range: Annotated[
        str | None, Setting("LOW-HIGH, without HIGH: the ids of random prompts", unset="1000-30000")
    ] = None
    max_len: Annotated[
        Tokens | None, Setting("prompt and answer together; longer requests are left out", unset="no limit")
    ] = None
    seed: Annotated[Seed, Setting("of lengths, arrivals and, with --salt, contents")] = 0
    salt: Annotated[
        str | None,
        Setting("makes the prompts' contents come back", unset="new prompts every time: no cache knows them"),
    ] = None


class PaceSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Pace."""

    concurrency: Annotated[
        Streams | None, Setting("closed loop of that many streams", unset="1, or open loop where a rate is given")
    ] = None
    rate: Annotated[Rate | None, Setting("open loop: requests a second", unset="closed loop, or the trace's clock")] = (
        None
    )
    arrivals: Annotated[Literal["gamma", "fixed"], Setting("gaps of an open loop")] = "gamma"
    burstiness: Annotated[
        Annotated[float, Meta(ge=0.01, le=1000)],
        Setting("shape of gamma gaps: 1 is Poisson, less comes in bursts, more is steadier"),
    ] = 1.0
    max_concurrency: Annotated[
        Streams | None,
        Setting("requests of an open loop in flight at most; waiting for it counts as latency", unset="no limit"),
    ] = None
    speed: Annotated[Annotated[float, Meta(gt=0, le=1000)], Setting("of the trace's own clock")] = 1.0


class MeasureSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Measuring."""

    repeats: Annotated[
        Annotated[int, Meta(ge=1, le=100)] | None,
        Setting("seeds, counted up from --seed", unset="1, or 3 with --against"),
    ] = None
    warmup: Annotated[
        Annotated[int, Meta(ge=0, le=1000)], Setting("requests before each run that are not measured")
    ] = 2
    slo: Annotated[
        str | None,
        Setting("limits of a good request, say ttft=500ms,itl=100ms (also tpot, e2e)", unset="no goodput"),
    ] = None
    timeout: Annotated[Seconds, Setting("seconds for one answer; then it has failed")] = 600.0
    processes: Annotated[
        Annotated[int, Meta(ge=1, le=64)] | None,
        Setting("client processes", unset="half the cores, at most 8 and one for 16 streams"),
    ] = None
    max_lag_ms: Annotated[
        Annotated[float, Meta(gt=0, le=10_000)],
        Setting("the client's own lateness (p99, of its loop and of its sends) that makes a run invalid"),
    ] = 10.0


class OutputSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Results."""

    out: Annotated[str | None, Setting("folder for the results' JSON and plots", unset="printed only")] = None
    plots: Annotated[bool, Setting("draw PNGs into --out; needs plait[bench]")] = True
    requests: Annotated[bool, Setting("keep a record of each request in the JSON")] = False
    keep_streams: Annotated[
        Annotated[int, Meta(ge=0, le=1000)],
        Setting("answers of each run whose prompts and token ids the JSON keeps, spread over its requests"),
    ] = 0


class BenchSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that `plait bench serve` is told, but the servers of --against."""

    server: ServerSettings = ServerSettings()
    load: LoadSettings = LoadSettings()
    pace: PaceSettings = PaceSettings()
    measure: MeasureSettings = MeasureSettings()
    output: OutputSettings = OutputSettings()
