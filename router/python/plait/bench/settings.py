"""Settings of `plait bench`: one struct for each component, each default beside its meaning."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from plait.bench.lengths import FORMS
from plait.setting import Setting
from plait.settings import Seed

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
        Setting("route: completions takes token ids of exact length; chat takes text, sized by the server's usage"),
    ] = "completions"
    stream: Annotated[bool, Setting("stream responses; without it there is no TTFT")] = True
    temperature: Annotated[Annotated[float, Meta(ge=0, le=2)], Setting("sampling temperature of every request")] = 0.0
    top_p: Annotated[
        Annotated[float, Meta(gt=0, le=1)], Setting("top-p of every request; needs a temperature above 0")
    ] = 1.0
    ignore_eos: Annotated[bool, Setting("generate to the full output length, past end tokens")] = True
    count_by: Annotated[
        Literal["auto", "running-usage", "token-ids", "usage", "chunks"],
        Setting("how the tokens of a chunk are counted; auto takes the first of these that the server supports"),
    ] = "auto"


class LoadSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Load."""

    profile: Annotated[
        Literal["prefill-heavy", "decode-heavy", "mla-backends", "sonnet", "chat"] | None,
        Setting("ready-made load; other settings override its own", unset="none"),
    ] = None
    scale: Annotated[
        Annotated[float, Meta(gt=0, le=1)],
        Setting("factor on lengths, and on a profile's streams and requests, for a small machine"),
    ] = 1.0
    num_prompts: Annotated[
        Count | None,
        Setting("requests to send", unset="100, the profile's, the file's, or --rate times --duration"),
    ] = None
    duration: Annotated[Seconds | None, Setting("seconds after which no further request starts", unset="no limit")] = (
        None
    )
    input_len: Annotated[str | None, Setting(f"prompt tokens: {FORMS}", unset="128 or the profile's")] = None
    output_len: Annotated[str | None, Setting("output tokens, in the same forms", unset="128 or the profile's")] = None
    num_prefixes: Annotated[Annotated[int, Meta(ge=0, le=100_000)], Setting("number of shared prefixes")] = 0
    prefix_len: Annotated[Tokens | None, Setting("tokens of each shared prefix, part of --input-len", unset="256")] = (
        None
    )
    trace: Annotated[str | None, Setting("trace to replay: Azure's CSV or Mooncake's JSONL", unset="none")] = None
    prompts: Annotated[
        str | None, Setting("JSONL of prompts: `prompt` or `messages`, and `output_len`", unset="none")
    ] = None
    text: Annotated[str | None, Setting("text file whose lines make the prompts", unset="random tokens")] = None
    token_range: Annotated[
        str | None, Setting("LOW-HIGH (exclusive): the ids of random prompts", unset="1000-30000")
    ] = None
    max_len: Annotated[
        Tokens | None, Setting("limit on prompt plus output; longer requests are left out", unset="no limit")
    ] = None
    seed: Annotated[Seed, Setting("seed of lengths, arrivals and, with --salt, contents")] = 0
    salt: Annotated[
        str | None,
        Setting("repeats the prompts' contents in every call", unset="new contents each time, in no prefix cache"),
    ] = None


class PaceSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Pace."""

    concurrency: Annotated[
        Streams | None, Setting("closed loop: number of streams", unset="1, or open loop with --rate")
    ] = None
    rate: Annotated[
        Rate | None, Setting("open loop: requests a second", unset="closed loop, or the trace's timestamps")
    ] = None
    arrivals: Annotated[Literal["gamma", "fixed"], Setting("distribution of an open loop's gaps")] = "gamma"
    burstiness: Annotated[
        Annotated[float, Meta(ge=0.01, le=1000)],
        Setting("shape of gamma gaps: 1 is Poisson, less is burstier, more is steadier"),
    ] = 1.0
    max_concurrency: Annotated[
        Streams | None,
        Setting("most requests of an open loop in flight; waiting for it counts as latency", unset="no limit"),
    ] = None
    speed: Annotated[Annotated[float, Meta(gt=0, le=1000)], Setting("replay speed of a trace")] = 1.0


class MeasureSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Measuring."""

    repeats: Annotated[
        Annotated[int, Meta(ge=1, le=100)] | None,
        Setting("number of runs, with seeds from --seed on", unset="1, or 3 with --against"),
    ] = None
    warmup: Annotated[
        Annotated[int, Meta(ge=0, le=1000)], Setting("warm-up requests before each run, not measured")
    ] = 2
    slo: Annotated[
        str | None,
        Setting("limits of a good request, such as ttft=500ms,itl=100ms (also tpot, e2e)", unset="no goodput"),
    ] = None
    timeout: Annotated[Seconds, Setting("seconds until a request fails")] = 600.0
    processes: Annotated[
        Annotated[int, Meta(ge=1, le=64)] | None,
        Setting("client processes", unset="one for 16 streams, at most 8 and half the cores"),
    ] = None
    max_lag_ms: Annotated[
        Annotated[float, Meta(gt=0, le=10_000)],
        Setting("lag of the client (p99, of its event loop and its sends) that makes a run invalid"),
    ] = 10.0


class OutputSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Results."""

    out: Annotated[str | None, Setting("folder for results as JSON and plots", unset="print only")] = None
    plots: Annotated[bool, Setting("draw plots into --out; needs plait[bench]")] = True
    requests: Annotated[bool, Setting("write a record of each request to the JSON")] = False
    keep_streams: Annotated[
        Annotated[int, Meta(ge=0, le=1000)],
        Setting("requests of each run, evenly spread, whose prompts and output ids are written to the JSON"),
    ] = 0


class BenchSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of `plait bench`, without the servers of --against."""

    server: ServerSettings = ServerSettings()
    load: LoadSettings = LoadSettings()
    pace: PaceSettings = PaceSettings()
    measure: MeasureSettings = MeasureSettings()
    output: OutputSettings = OutputSettings()
