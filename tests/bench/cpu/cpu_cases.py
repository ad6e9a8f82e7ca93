"""The loads of the CPU bench, as settings of `plait bench`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

from msgspec.structs import replace as replace_settings
from plait.bench.cases import cases
from plait.bench.settings import BenchSettings, LoadSettings, MeasureSettings, PaceSettings

Kind = Literal["one stream", "eight streams", "beside a busy process", "profile"]
KINDS = get_args(Kind)


@dataclass(frozen=True)
class CpuCase:
    """One load, the servers that take it, and the number of runs."""

    name: str
    settings: BenchSettings
    kind: Kind
    repeats: int

    @property
    def is_beside_busy(self) -> bool:
        """Whether a process that computes without end runs beside it."""
        return self.kind == "beside a busy process"

    @property
    def alone(self) -> str:
        """The name of the same load with nothing beside it."""
        return self.name.removesuffix(f" {self.kind}")


def closed_loop(num_streams: int, input_len: int, per_stream: int, repeats: int) -> CpuCase:
    load = LoadSettings(num_prompts=per_stream * num_streams, input_len=str(input_len), output_len="64")
    kind: Kind = "one stream" if num_streams == 1 else "eight streams"
    return _case(load, PaceSettings(concurrency=num_streams), kind, repeats, answer_seconds=60.0)


def beside_busy(case: CpuCase, seconds: float, repeats: int) -> CpuCase:
    """The same load beside a busy process; no request begins after some seconds, as servers may collapse."""
    load = replace_settings(case.settings.load, duration=seconds)
    made = _case(load, case.settings.pace, "beside a busy process", repeats, answer_seconds=60.0)
    return replace(made, name=f"{made.name} {made.kind}")


def sonnet(num_prompts: int) -> CpuCase:
    """vllm-metal's own: 1024 in, 128 out, 200 of the prompt shared, 10 requests a second, at most 32 at a time."""
    load = LoadSettings(profile="sonnet", num_prompts=num_prompts)
    return _case(load, PaceSettings(), "profile", repeats=1, answer_seconds=180.0)


def _case(load: LoadSettings, pace: PaceSettings, kind: Kind, repeats: int, answer_seconds: float) -> CpuCase:
    """A server that hangs costs at most `answer_seconds` for each answer."""
    settings = BenchSettings(load=load, pace=pace, measure=MeasureSettings(timeout=answer_seconds))
    (made,) = cases(settings)
    return CpuCase(made.name, settings, kind, repeats)


EIGHT = closed_loop(num_streams=8, input_len=128, per_stream=4, repeats=3)
CASES = (
    closed_loop(num_streams=1, input_len=128, per_stream=4, repeats=3),
    closed_loop(num_streams=1, input_len=512, per_stream=4, repeats=3),
    EIGHT,
    closed_loop(num_streams=8, input_len=512, per_stream=3, repeats=3),
    beside_busy(EIGHT, seconds=12.0, repeats=2),
    # 40 of its 100 requests: more than are in flight at a time, and at most a minute for each server.
    sonnet(num_prompts=40),
)
