"""The loads of the CPU bench, as settings of `plait bench`."""

from __future__ import annotations

from dataclasses import dataclass

from plait.bench.cases import cases
from plait.bench.settings import BenchSettings, LoadSettings, MeasureSettings, PaceSettings

BESIDE_BUSY = " beside a busy process"


@dataclass(frozen=True)
class CpuCase:
    """One load, who carries it and how often."""

    name: str
    settings: BenchSettings
    num_streams: int
    """In flight at most."""
    repeats: int
    beside_busy: bool = False
    """A process that computes without end runs beside it."""

    @property
    def takes_variants(self) -> bool:
        """Whether Plait is measured with other settings too: where requests meet, and nothing else does."""
        return self.num_streams > 1 and not self.beside_busy

    @property
    def alone(self) -> str:
        """The name of the same load with nothing beside it."""
        return self.name.removesuffix(BESIDE_BUSY)


def closed_loop(num_streams: int, input_len: int, per_stream: int, repeats: int) -> CpuCase:
    load = LoadSettings(num_prompts=per_stream * num_streams, input_len=str(input_len), output_len="64")
    return _case(load, PaceSettings(concurrency=num_streams), num_streams, repeats, answer_seconds=60.0)


def beside_busy(case: CpuCase, seconds: float, repeats: int) -> CpuCase:
    """The same load beside a busy process; no request begins after some seconds, as servers may collapse."""
    load = LoadSettings(
        num_prompts=case.settings.load.num_prompts,
        input_len=case.settings.load.input_len,
        output_len=case.settings.load.output_len,
        duration=seconds,
    )
    made = _case(load, case.settings.pace, case.num_streams, repeats, answer_seconds=60.0)
    return CpuCase(made.name + BESIDE_BUSY, made.settings, made.num_streams, made.repeats, beside_busy=True)


def sonnet(num_prompts: int, cap: int) -> CpuCase:
    """vllm-metal's own: 1024 in, 128 out, 200 of the prompt shared, 10 requests a second, at most `cap` at a time."""
    return _case(LoadSettings(profile="sonnet", num_prompts=num_prompts), PaceSettings(), cap, 1, 180.0)


def _case(load: LoadSettings, pace: PaceSettings, num_streams: int, repeats: int, answer_seconds: float) -> CpuCase:
    """A server that stands still costs `answer_seconds` for each answer, and no more."""
    settings = BenchSettings(load=load, pace=pace, measure=MeasureSettings(timeout=answer_seconds))
    (made,) = cases(settings)
    return CpuCase(made.name, settings, num_streams, repeats)


EIGHT = closed_loop(num_streams=8, input_len=128, per_stream=4, repeats=3)
CASES = (
    closed_loop(num_streams=1, input_len=128, per_stream=6, repeats=3),
    closed_loop(num_streams=1, input_len=512, per_stream=6, repeats=3),
    EIGHT,
    closed_loop(num_streams=8, input_len=512, per_stream=3, repeats=3),
    beside_busy(EIGHT, seconds=12.0, repeats=2),
    # 40 of its 100 requests: more than are in flight at a time, and no more than a minute a server.
    sonnet(num_prompts=40, cap=32),
)
