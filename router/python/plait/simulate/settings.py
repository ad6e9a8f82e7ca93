"""Settings of `plait simulate`; scheduler and pages are those of `plait serve`."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from plait.setting import Setting
from plait.settings import (
    PAGE_SIZE,
    ContextLength,
    PageSettings,
    SchedulerSettings,
    Seed,
    ThreadCount,
)

POISSON = "poisson"
SCENARIOS = ("bursts", "agents", "flood", "long-prompt", "priorities", "conversations")
"""Loads that put the policies under pressure; `plait_sim::Profile` says what each is."""

ReplicaCount = Annotated[int, Meta(ge=1, le=1024)]
Scale = Annotated[float, Meta(ge=1e-6, le=1e6)]
Rate = Annotated[float, Meta(gt=0, le=1e6)]
RequestCount = Annotated[int, Meta(ge=1, le=10_000_000)]
Length = Annotated[int, Meta(ge=1, le=16_777_216)]
TenantCount = Annotated[int, Meta(ge=1, le=10_000)]
GpuCount = Annotated[int, Meta(ge=1, le=64)]
Routing = Literal["in-turn", "least-loaded", "prefix-aware"]


class LoadSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Load."""

    trace: Annotated[
        str,
        Setting(
            "Azure's .csv, Mooncake's .jsonl, `poisson` (requests of one size), or a scenario: "
            "bursts, agents, flood, long-prompt, priorities, conversations"
        ),
    ] = POISSON
    rate_scale: Annotated[Scale, Setting("factor on the arrival rate")] = 1.0
    rate: Annotated[Rate, Setting("poisson, scenarios: mean requests a second")] = 10.0
    num_prompts: Annotated[RequestCount, Setting("poisson, scenarios: number of requests")] = 1000
    input_len: Annotated[Length, Setting("poisson: prompt tokens of each request")] = 1024
    output_len: Annotated[Length, Setting("poisson: output tokens of each request")] = 128
    seed: Annotated[Seed, Setting("seed of the arrivals, and of --tenants")] = 0
    tenants: Annotated[
        TenantCount | None,
        Setting("deal the requests to so many tenants at random", unset="the source's own tenants"),
    ] = None


class ClusterSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Cluster."""

    replicas: Annotated[ReplicaCount, Setting("number of replicas")] = 1
    routing: Annotated[
        Routing,
        Setting(
            "in-turn is round-robin; least-loaded takes the replica with the fewest open requests; prefix-aware routes "
            "as serve does with --dp"
        ),
    ] = "in-turn"
    hardware: Annotated[str, Setting("h200, b200, a file of rates, or a run's step trace (.jsonl)")] = "h200"
    model: Annotated[
        str, Setting("qwen3-8b, llama-3.1-70b, deepseek-v2-lite, deepseek-v3, or a model's config.json")
    ] = "qwen3-8b"
    dp_attention: Annotated[
        bool,
        Setting(
            "the replicas share the model's experts and step together, each with attention of its own",
            ("--enable-dp-attention",),
        ),
    ] = False
    tp: Annotated[
        GpuCount | None,
        Setting(
            "GPUs of one replica", ("--tensor-parallel-size", "--tp-size"), unset="the fewest that hold the weights"
        ),
    ] = None
    max_model_len: Annotated[
        ContextLength | None,
        Setting("longest prompt plus output, in tokens", ("--context-length",), unset="the model's context"),
    ] = None
    threads: Annotated[ThreadCount | None, Setting("threads of the simulator", unset="the machine's cores")] = None


class OutputSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Output."""

    out: Annotated[
        str | None, Setting("folder for summary.json and plots; also runs the opposite of --mixed", unset="print only")
    ] = None


class SimulateSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of `plait simulate`."""

    load: LoadSettings = LoadSettings()
    cluster: ClusterSettings = ClusterSettings()
    scheduler: SchedulerSettings = SchedulerSettings(max_batch_tokens=8192, max_seqs=256)
    pages: PageSettings = PageSettings(page_size=PAGE_SIZE, memory_fraction=0.85)
    output: OutputSettings = OutputSettings()


class Poisson(msgspec.Struct, frozen=True, kw_only=True):
    """Synthetic arrivals, in the simulator's JSON."""

    rate: float
    num_prompts: int
    input_len: int
    output_len: int
    seed: int


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """A load that puts the policies under pressure, in the simulator's JSON."""

    profile: str
    rate: float
    num_prompts: int
    seed: int


class SimulatorLoad(msgspec.Struct, frozen=True, kw_only=True):
    """The load, in the simulator's JSON."""

    source: dict[Literal["trace", "poisson", "scenario"], str | Poisson | Scenario]
    rate_scale: float
    tenants: int | None
    seed: int


class SimulatorSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the simulator, as JSON; the serde mirror is `plait_sim::Settings`."""

    load: SimulatorLoad
    cluster: ClusterSettings
    scheduler: SchedulerSettings
    pages: PageSettings


def simulator_settings(settings: SimulateSettings) -> SimulatorSettings:
    return SimulatorSettings(
        load=_simulator_load(settings.load),
        cluster=settings.cluster,
        scheduler=settings.scheduler,
        pages=settings.pages,
    )


def _simulator_load(load: LoadSettings) -> SimulatorLoad:
    source: dict[Literal["trace", "poisson", "scenario"], str | Poisson | Scenario]
    if load.trace == POISSON:
        source = {"poisson": _poisson(load)}
    elif load.trace in SCENARIOS:
        scenario = Scenario(profile=load.trace, rate=load.rate, num_prompts=load.num_prompts, seed=load.seed)
        source = {"scenario": scenario}
    else:
        source = {"trace": load.trace}
    return SimulatorLoad(source=source, rate_scale=load.rate_scale, tenants=load.tenants, seed=load.seed)


def _poisson(load: LoadSettings) -> Poisson:
    return Poisson(
        rate=load.rate,
        num_prompts=load.num_prompts,
        input_len=load.input_len,
        output_len=load.output_len,
        seed=load.seed,
    )
