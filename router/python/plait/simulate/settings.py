"""Settings of `plait simulate`: each component's in one struct, the default beside its meaning."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from plait.settings import (
    ContextLength,
    PageSettings,
    SchedulerSettings,
    Seed,
    Setting,
    ThreadCount,
)

POISSON = "poisson"

ReplicaCount = Annotated[int, Meta(ge=1, le=1024)]
Scale = Annotated[float, Meta(ge=1e-6, le=1e6)]
Rate = Annotated[float, Meta(gt=0, le=1e6)]
RequestCount = Annotated[int, Meta(ge=1, le=10_000_000)]
Length = Annotated[int, Meta(ge=1, le=16_777_216)]
GpuCount = Annotated[int, Meta(ge=1, le=64)]
Routing = Literal["in-turn", "least-loaded"]


class LoadSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Load."""

    trace: Annotated[str, Setting("Azure's .csv or Mooncake's .jsonl, or `poisson`: requests of one size")] = POISSON
    rate_scale: Annotated[Scale, Setting("how many times as fast requests arrive")] = 1.0
    rate: Annotated[Rate, Setting("requests a second of poisson")] = 10.0
    num_prompts: Annotated[RequestCount, Setting("requests of poisson")] = 1000
    input_len: Annotated[Length, Setting("prompt tokens of poisson's requests")] = 1024
    output_len: Annotated[Length, Setting("answer tokens of poisson's requests")] = 128
    seed: Annotated[Seed, Setting("seeds poisson's arrivals")] = 0


class ClusterSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Cluster."""

    replicas: Annotated[ReplicaCount, Setting("replicas that requests are shared among")] = 1
    routing: Annotated[Routing, Setting("whose turn a request is, or the replica with the fewest unanswered")] = (
        "in-turn"
    )
    hardware: Annotated[str, Setting("h200, b200, a file of rates, or a run's step trace (.jsonl)")] = "h200"
    model: Annotated[
        str, Setting("qwen3-8b, llama-3.1-70b, deepseek-v2-lite, deepseek-v3, or a model's config.json")
    ] = "qwen3-8b"
    tp: Annotated[
        GpuCount | None,
        Setting(
            "GPUs of one replica", ("--tensor-parallel-size", "--tp-size"), unset="the fewest that hold the weights"
        ),
    ] = None
    max_model_len: Annotated[
        ContextLength | None,
        Setting("longest prompt plus answer, in tokens", ("--context-length",), unset="the model's context"),
    ] = None
    threads: Annotated[ThreadCount | None, Setting("threads that simulate", unset="the machine's cores")] = None


class OutputSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Output."""

    out: Annotated[
        str | None, Setting("folder for summary.json and plots; then the other mode runs too", unset="none are written")
    ] = None


class SimulateSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that `plait simulate` is told."""

    load: LoadSettings = LoadSettings()
    cluster: ClusterSettings = ClusterSettings()
    scheduler: SchedulerSettings = SchedulerSettings(max_batch_tokens=8192, max_seqs=256)
    pages: PageSettings = PageSettings(memory_fraction=0.85)
    output: OutputSettings = OutputSettings()


class Poisson(msgspec.Struct, frozen=True, kw_only=True):
    """Synthetic arrivals, as the simulator is told of them."""

    rate: float
    num_prompts: int
    input_len: int
    output_len: int
    seed: int


class SimulatorLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What arrives, as the simulator is told of it."""

    source: dict[Literal["trace", "poisson"], str | Poisson]
    rate_scale: float


class SimulatorSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What the simulator is given as JSON; mirrored by serde in `plait_sim::Settings`."""

    load: SimulatorLoad
    cluster: ClusterSettings
    scheduler: SchedulerSettings
    pages: PageSettings


def simulator_settings(settings: SimulateSettings) -> SimulatorSettings:
    """What the simulator needs of `settings`."""
    return SimulatorSettings(
        load=_simulator_load(settings.load),
        cluster=settings.cluster,
        scheduler=settings.scheduler,
        pages=settings.pages,
    )


def _simulator_load(load: LoadSettings) -> SimulatorLoad:
    if load.trace != POISSON:
        return SimulatorLoad(source={"trace": load.trace}, rate_scale=load.rate_scale)
    poisson = Poisson(
        rate=load.rate,
        num_prompts=load.num_prompts,
        input_len=load.input_len,
        output_len=load.output_len,
        seed=load.seed,
    )
    return SimulatorLoad(source={"poisson": poisson}, rate_scale=load.rate_scale)
