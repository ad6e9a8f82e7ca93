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


PROFILE_SCALE = 0.25
"""At which a profile's prompts fit into 40,960 tokens."""


@dataclass(frozen=True, slots=True)
class LoadCase:
    """One load: so many streams in a closed loop, or requests that come at a rate."""

    lengths: tuple[int, int] | str
    """Tokens of each prompt and answer; or a profile of `plait bench`, at `PROFILE_SCALE`."""
    num_prompts: int
    streams: int | None = None
    rate: float | None = None
    """Requests a second."""
    serve_flags: tuple[str, ...] = ()
    bench_flags: tuple[str, ...] = ()
    goals: Sequence[Goal] = ()

    @property
    def is_drawn(self) -> bool:
        """Whether its tokens are sampled at random, so that they need not be the best."""
        return "--temperature" in self.bench_flags

    @property
    def name(self) -> str:
        """As the results name it."""
        pace = f"{self.rate:g}/s" if self.rate is not None else f"{self.streams}"
        flags = " ".join((*self.serve_flags, *self.bench_flags))
        match self.lengths:
            case str(profile):
                shape = f"{profile} x {PROFILE_SCALE:g}"
            case (prompt, answer):
                shape = f"{prompt}/{answer}"
        return f"{shape} @ {pace}" + (f", {flags}" if flags else "")

    def shortened(self, share: float) -> LoadCase:
        """With so many of its requests; what is asked of them is asked of whole loads alone."""
        if share == 1:
            return self
        num_prompts = max(self.streams or 1, round(self.num_prompts * share))
        return dataclasses.replace(self, num_prompts=num_prompts, goals=())

    def bench_words(self) -> list[str]:
        """Its flags for `plait bench serve`."""
        pace = ["--rate", f"{self.rate}"] if self.rate is not None else ["--concurrency", f"{self.streams}"]
        match self.lengths:
            case str(profile):
                lengths = ["--profile", profile, "--scale", f"{PROFILE_SCALE}"]
            case (prompt, answer):
                lengths = ["--input-len", f"{prompt}", "--output-len", f"{answer}"]
        return [*pace, *lengths, "--num-prompts", f"{self.num_prompts}", *self.bench_flags]


def closed(streams: int, lengths: tuple[int, int], num_prompts: int, rate: float, *goals: Goal) -> LoadCase:
    """A closed loop of which so many tokens a second are asked."""
    return LoadCase(lengths, num_prompts, streams=streams, goals=(Goal(RATE, rate), *goals))


TARGET = ("--itl-target-ms", "30")


def drawn(case: LoadCase) -> LoadCase:
    """The same load with random sampling; its goal is a share of the greedy rate."""
    return dataclasses.replace(case, bench_flags=("--temperature", "0.7", "--top-p", "0.9"), goals=())


def mixing(*serve_flags: str) -> tuple[LoadCase, ...]:
    """Loads whose work is mostly prompts, and mostly answers, at rates that rise to what a GPU can do."""
    sweeps = {"prefill-heavy": (3, 6, 9, 12), "decode-heavy": (8, 16, 24)}
    return (
        LoadCase((2048, 64), 224, streams=56, serve_flags=serve_flags),
        LoadCase((256, 512), 288, streams=96, serve_flags=serve_flags),
        *(
            LoadCase(profile, 10 * rate, rate=rate, serve_flags=serve_flags)
            for profile, rates in sweeps.items()
            for rate in rates
        ),
    )


MOST_STREAMS = closed(256, (128, 128), 1024, 17_000)
QWEN3_8B_AWQ = (
    closed(1, (128, 128), 16, 454),
    closed(64, (128, 128), 384, 13_488),
    closed(256, (128, 128), 1024, 16_602),
    closed(256, (1024, 128), 512, 4_041),
    closed(32, (8192, 256), 64, 790),
)
"""4-bit weights: 1.9 times as much as bfloat16 on an H200 at one stream, 1.4 times at 64, and no less elsewhere."""
QWEN3_8B = (
    closed(1, (128, 128), 16, 230),
    closed(64, (128, 128), 384, 9_500),
    MOST_STREAMS,
    drawn(MOST_STREAMS),
    closed(256, (1024, 128), 512, 4_000, Goal("itl_max", 0.3)),
    closed(32, (8192, 256), 64, 785),
    LoadCase((1024, 128), 300, rate=20, serve_flags=TARGET, goals=(Goal("ttft_p50", 0.055), Goal("itl_p99", 0.04))),
    LoadCase(
        (1024, 128),
        300,
        rate=20,
        serve_flags=("--itl-target-ms", "40"),
        goals=(Goal("ttft_p50", 0.055), Goal("itl_p99", 0.04)),
    ),
    LoadCase(
        (8192, 256),
        40,
        rate=1.9,
        serve_flags=TARGET,
        goals=(Goal("itl_p99", 0.035), Goal("itl_max", 0.06), Goal("ttft_p50", 0.38)),
    ),
)
QWEN3_8B_FP8 = (
    closed(1, (128, 128), 16, 390),
    closed(64, (128, 128), 384, 14_000),
    closed(256, (128, 128), 1024, 24_000),
    closed(256, (1024, 128), 512, 6_300),
    closed(32, (8192, 256), 64, 1_150),
)
QWEN3_8B_MIXING = (*mixing(), *mixing("--no-mixed"))
V2_LITE = (
    closed(1, (128, 128), 16, 450),
    closed(64, (128, 128), 384, 1.15 * 5_559),
    closed(256, (128, 128), 1024, 20_000),
    closed(256, (1024, 128), 768, 7_600),
    closed(32, (8192, 256), 64, 1_410),
    LoadCase((1024, 128), 512, streams=256, serve_flags=TARGET, goals=(Goal("itl_max", 0.06),)),
    LoadCase((8192, 256), 64, streams=32, serve_flags=TARGET, goals=(Goal("itl_max", 0.06),)),
)
V2_LITE_FP8 = (
    closed(1, (128, 128), 16, 560),
    closed(64, (128, 128), 384, 10_500),
    closed(256, (128, 128), 1024, 26_000),
    closed(256, (1024, 128), 768, 11_000),
    closed(32, (8192, 256), 64, 1_900),
)
FEW_STREAMS = LoadCase((16, 8), 6, streams=2)
TINY = (
    FEW_STREAMS,
    drawn(FEW_STREAMS),
    LoadCase((16, 8), 6, rate=20, serve_flags=TARGET, goals=(Goal("ttft_p50", 60.0),)),
)


TWO_GPU_LOADS = (
    (1, (128, 128), 16),
    (64, (128, 128), 384),
    (256, (128, 128), 1024),
    (256, (1024, 128), 768),
    (32, (8192, 256), 64),
)


def two_gpus(rates: Sequence[float], ttft_ms: Sequence[float], longest_gap_ms: Sequence[float]) -> tuple[LoadCase, ...]:
    """The loads of two GPUs: tokens a second that are asked; vLLM's median of first tokens, and its longest gap."""
    return tuple(
        closed(*load, rate, Goal("ttft_p50", ttft / 1e3), Goal("itl_max", gap / 1e3))
        for load, rate, ttft, gap in zip(TWO_GPU_LOADS, rates, ttft_ms, longest_gap_ms, strict=True)
    )


QWEN3_8B_TP2 = two_gpus((340, 14_900, 28_500, 7_500, 1_560), (10, 117, 305, 477, 542), (6, 102, 125, 132, 150))
_V2_LITE_TIMES = (13, 97, 176, 198, 292), (4, 66, 67, 340, 82)
V2_LITE_TP2 = two_gpus((500, 10_000, 29_500, 12_000, 2_200), *_V2_LITE_TIMES)
V2_LITE_DP2 = two_gpus((400, 10_500, 31_500, 12_400, 2_350), *_V2_LITE_TIMES)
"""With DP attention; the better of both layouts is asked for 500 tokens a second at one stream."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A shape of `model_shapes` with its loads."""

    shape: str
    cases: Sequence[LoadCase]
    num_gpus: int = 1

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
    "qwen3-8b-fp8": Loaded("qwen3-8b", QWEN3_8B_FP8),
    "qwen3-8b-awq": Loaded("qwen3-8b-awq", QWEN3_8B_AWQ),
    "qwen3-8b-mixing": Loaded("qwen3-8b", QWEN3_8B_MIXING),
    "v2-lite": Loaded("deepseek-v2-lite", V2_LITE),
    "v2-lite-fp8": Loaded("deepseek-v2-lite", V2_LITE_FP8),
    "qwen3-8b-tp2": Loaded("qwen3-8b", QWEN3_8B_TP2, num_gpus=2),
    "v2-lite-tp2": Loaded("deepseek-v2-lite", V2_LITE_TP2, num_gpus=2),
    "v2-lite-dp2": Loaded("deepseek-v2-lite", V2_LITE_DP2, num_gpus=2),
    "tiny": Loaded("tiny", TINY),
}
"""By the name that `serve_load.py --shape` takes; `tiny` is for a dry run on a CPU."""
