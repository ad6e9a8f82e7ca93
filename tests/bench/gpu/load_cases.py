"""The loads that a shape is held to, with what is asked of each."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

RATE = "output_tokens_per_second"


@dataclass(frozen=True, slots=True)
class Goal:
    """A bound on one figure, set for the nominal machine; a rate is a least value, a time a greatest."""

    metric: str
    value: float
    """Tokens a second, or seconds."""

    def scaled(self, share: float) -> float:
        """For a machine whose floor is this share of the nominal one's rate."""
        return self.value * share if self.metric == RATE else self.value / share

    def is_met(self, value: float, share: float = 1.0) -> bool:
        """Whether a figure reaches the goal, scaled."""
        return value >= self.scaled(share) if self.metric == RATE else value <= self.scaled(share)


@dataclass(frozen=True, slots=True)
class LoadCase:
    """One load: so many streams in a closed loop, or requests that come at a rate."""

    input_len: int
    output_len: int
    num_prompts: int
    streams: int | None = None
    rate: float | None = None
    """Requests a second."""
    serve_flags: tuple[str, ...] = ()
    bench_flags: tuple[str, ...] = ()
    goals: Sequence[Goal] = ()

    @property
    def name(self) -> str:
        """As the results name it."""
        pace = f"{self.rate:g}/s" if self.rate is not None else f"{self.streams}"
        flags = " ".join((*self.serve_flags, *self.bench_flags))
        return f"{self.input_len}/{self.output_len} @ {pace}" + (f", {flags}" if flags else "")

    def shortened(self, share: float) -> LoadCase:
        """With so many of its requests; what is asked of them is asked of whole loads alone."""
        if share == 1:
            return self
        num_prompts = max(self.streams or 1, round(self.num_prompts * share))
        return dataclasses.replace(self, num_prompts=num_prompts, goals=())

    def bench_words(self) -> list[str]:
        """What `plait bench serve` is told of it."""
        pace = ["--rate", f"{self.rate}"] if self.rate is not None else ["--concurrency", f"{self.streams}"]
        lengths = ["--input-len", f"{self.input_len}", "--output-len", f"{self.output_len}"]
        return [*pace, *lengths, "--num-prompts", f"{self.num_prompts}", *self.bench_flags]


def closed(streams: int, lengths: tuple[int, int], num_prompts: int, rate: float, *goals: Goal) -> LoadCase:
    """A closed loop of which so many tokens a second are asked."""
    return LoadCase(*lengths, num_prompts, streams=streams, goals=(Goal(RATE, rate), *goals))


TARGET = ("--itl-target-ms", "30")


def heavy(*serve_flags: str) -> tuple[LoadCase, LoadCase]:
    """Loads whose work is mostly prompts, and mostly answers."""
    return (
        LoadCase(*(2048, 64, 112), streams=56, serve_flags=serve_flags),
        LoadCase(*(256, 512, 192), streams=96, serve_flags=serve_flags),
    )


QWEN3_8B = (
    closed(1, (128, 128), 16, 230),
    closed(64, (128, 128), 384, 9_500),
    closed(256, (128, 128), 1024, 17_000),
    closed(256, (1024, 128), 512, 4_000, Goal("itl_max", 0.3)),
    closed(32, (8192, 256), 64, 785),
    LoadCase(*(1024, 128, 300), rate=20, serve_flags=TARGET, goals=(Goal("ttft_p50", 0.055), Goal("itl_p99", 0.04))),
    LoadCase(
        *(1024, 128, 300),
        rate=20,
        serve_flags=("--itl-target-ms", "40"),
        goals=(Goal("ttft_p50", 0.055), Goal("itl_p99", 0.04)),
    ),
    LoadCase(
        *(8192, 256, 40),
        rate=1.9,
        serve_flags=TARGET,
        goals=(Goal("itl_p99", 0.035), Goal("itl_max", 0.06), Goal("ttft_p50", 0.38)),
    ),
    *heavy(),
    *heavy("--no-mixed"),
)
V2_LITE = (
    closed(1, (128, 128), 16, 450),
    closed(64, (128, 128), 384, 1.15 * 5_559),
    closed(256, (128, 128), 1024, 20_000),
    closed(256, (1024, 128), 768, 7_600),
    closed(32, (8192, 256), 64, 1_410),
    LoadCase(*(1024, 128, 512), streams=256, serve_flags=TARGET, goals=(Goal("itl_max", 0.06),)),
    LoadCase(*(8192, 256, 64), streams=32, serve_flags=TARGET, goals=(Goal("itl_max", 0.06),)),
)
TINY = (
    LoadCase(*(16, 8, 6), streams=2),
    LoadCase(*(16, 8, 6), rate=20, serve_flags=TARGET, goals=(Goal("ttft_p50", 60.0),)),
)


@dataclass(frozen=True, slots=True)
class Loaded:
    """A shape of `model_shapes` with its loads."""

    shape: str
    cases: Sequence[LoadCase]

    def chosen(self, is_wanted: Callable[[LoadCase], bool]) -> list[LoadCase]:
        """Some of them, those of the same server one after the other."""
        wanted = [case for case in self.cases if is_wanted(case)]
        return sorted(wanted, key=lambda case: self.servers.index(case.serve_flags))

    @property
    def servers(self) -> list[tuple[str, ...]]:
        """The flags of each server that is needed."""
        return list(dict.fromkeys(case.serve_flags for case in self.cases))


LOADED = {
    "qwen3-8b": Loaded("qwen3-8b", QWEN3_8B),
    "v2-lite": Loaded("deepseek-v2-lite", V2_LITE),
    "tiny": Loaded("tiny", TINY),
}
"""By the name that `serve_load.py --shape` takes; `tiny` is for a dry run on a CPU."""
