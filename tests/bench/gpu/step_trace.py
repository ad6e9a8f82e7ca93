"""What a step does to the host, from a profiler's trace: parts of its time, calls that wait or allocate, gaps.

    python tests/bench/gpu/step_trace.py FOLDER --out FILE [--trace FOLDER]

Random weights of the folder's configuration, steps launched one ahead as in the loop. The device is idle between two
steps from the end of one's last copy to the host until the next one's first kernel or copy.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from plait_worker.rank import Rank
from torch.profiler import ProfilerActivity

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.gpu.step_times import PAGE_SIZE, Ahead, open_rank
from plait_testing.stepper import Stepper

STEPS = 12
DEPTH = 192
WAITING = (
    *("cudaMalloc", "cudaFree", "cudaHostAlloc", "cudaFreeHost", "cudaMallocAsync", "cudaMemcpy", "cudaMemset"),
    *("cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize"),
)
"""Calls that allocate, or hold the host up."""
STEADY = "all steps"
PARTS = ("plan", "graph", "rows", "forward", "sample", "download")
HOST_GOALS_MS = {1: 0.8, 256: 2.0}
"""By decode rows: from the plan's receipt to the last launch."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A sort of step: so many rows that decode, beside so many tokens of prompts."""

    num_decode: int
    num_prompt: int = 0

    @property
    def name(self) -> str:
        """As the results name it."""
        prompts = f" and a prompt's {self.num_prompt} tokens" if self.num_prompt else ""
        return f"{self.num_decode} decode rows at {DEPTH}{prompts}"


class Steps:
    """A rank with rows that decode, and new prompts for each step if the kind has them."""

    def __init__(self, rank: Rank, kind: Kind) -> None:
        self.kind = kind
        self.ahead = Ahead(rank)
        self.stepper = Stepper(rank.step, PAGE_SIZE, rank.cache.num_pages)
        self.decoding = [self._admit(DEPTH) for _ in range(kind.num_decode)]
        for first in range(0, kind.num_decode, 32):
            self.stepper.step(prefill=dict.fromkeys(self.decoding[first : first + 32], DEPTH))
        for _ in range(4):
            self.step()
        self.stepper._compute = self.ahead.compute
        self.step()

    def step(self) -> None:
        """One more."""
        prompt = {self._admit(self.kind.num_prompt): self.kind.num_prompt} if self.kind.num_prompt else {}
        self.stepper.step(prefill=prompt, decode=self.decoding)
        for slot in prompt:
            self.stepper.free(slot)

    def end(self) -> None:
        """Wait for the last one and free all rows."""
        self.ahead.catch_up()
        self.stepper._compute = self.ahead.rank.step
        for slot in self.decoding:
            self.stepper.free(slot)
        self.stepper.step()

    def _admit(self, num_tokens: int) -> int:
        return self.stepper.admit(torch.randint(0, 30_000, (num_tokens,)).tolist())


def measure(rank: Rank, kind: Kind, trace_to: Path | None) -> dict[str, float]:
    """The figures of one sort of step, by metric and unit."""
    steps = Steps(rank, kind)
    launch_ms = _launch_ms(steps)
    with torch.profiler.profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        with torch.profiler.record_function(STEADY):
            for _ in range(STEPS):
                steps.step()
        steps.ahead.catch_up()
        torch.cuda.synchronize()
    steps.end()
    if trace_to is not None:
        trace.export_chrome_trace(str(trace_to / f"{kind.num_decode}-{kind.num_prompt}.json.gz"))
    return launch_ms | _calls(trace.events()) | _parts(trace.events()) | _gaps(trace.events())


def _launch_ms(steps: Steps) -> dict[str, float]:
    """Without a profiler, whose own time is a good part of what it shows."""
    steps.ahead.launch_ms.clear()
    began = time.perf_counter()
    for _ in range(3 * STEPS):
        steps.step()
    step_ms = (time.perf_counter() - began) * 1e3 / (3 * STEPS)
    times = sorted(steps.ahead.launch_ms)
    return {"step ms": step_ms, "launch_p50 ms": statistics.median(times), "launch_max ms": times[-1]}


def _calls(events: Any) -> dict[str, float]:
    """A step's calls of CUDA's runtime and driver: those that wait or allocate, and all launches.

    What follows the last step is the end of the measurement.
    """
    (steady,) = (event.time_range for event in events if _is_host(event) and event.name == STEADY)
    within = [
        event.name for event in events if _is_host(event) and steady.start <= event.time_range.start <= steady.end
    ]
    counts = Counter(name for name in within if name.startswith(("cuda", "cu")) and name[2:3] != "_")
    launches = sum(num for name, num in counts.items() if "Launch" in name)
    return {f"{name} calls": counts[name] / STEPS for name in WAITING} | {"launches calls": launches / STEPS}


def _parts(events: Any) -> dict[str, float]:
    """The host's time in each named part of a step, the profiler's share included."""
    times = {
        part: [event.cpu_time_total for event in events if _is_host(event) and event.name == part] for part in PARTS
    }
    return {f"host {part} us": sum(found) / STEPS for part, found in times.items() if found}


def _gaps(events: Any) -> dict[str, float]:
    """Idle time of the device: between steps, and inside them."""
    works = sorted((event.time_range.start, event.time_range.end, event.name) for event in events if _is_device(event))
    ends = [index for index, (_, _, name) in enumerate(works[:-1]) if "DtoH" in name]
    between = [max(0.0, works[index + 1][0] - works[index][1]) for index in ends]
    idle, reached = 0.0, works[0][0]
    for begin, end, _ in works:
        idle += max(0.0, begin - reached)
        reached = max(reached, end)
    return {
        "gap_between_steps_p50 us": statistics.median(between),
        "gap_between_steps_max us": max(between),
        "idle_share share": idle / (reached - works[0][0]),
    }


def _is_host(event: Any) -> bool:
    return bool(event.device_type == torch.autograd.DeviceType.CPU)


def _is_device(event: Any) -> bool:
    """Kernels and copies, not the ranges that the profiler draws around them."""
    is_range = event.name in (STEADY, *PARTS) or event.name.startswith(("step: ", "attention: "))
    return bool(event.device_type == torch.autograd.DeviceType.CUDA) and not is_range


def rows(kind: Kind, figures: dict[str, float]) -> list[dict[str, object]]:
    """As the results file has them."""
    made: list[dict[str, object]] = []
    for name, value in figures.items():
        metric, unit = name.rsplit(" ", 1)
        goal: float | None = 0.0 if unit == "calls" and metric != "launches" else None
        if metric == "launch_p50" and not kind.num_prompt:
            goal = HOST_GOALS_MS.get(kind.num_decode)
        if metric == "cudaEventSynchronize":
            goal = 1.0
        made.append({"case": kind.name, "metric": metric, "unit": unit, "value": round(value, 4), "goal": goal})
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", default="1,64,256")
    parser.add_argument("--attention", default="triton")
    parser.add_argument("--trace", type=Path, help="folder for the traces themselves")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    counts = [int(word) for word in options.rows.split(",")]
    kinds = [Kind(count) for count in counts] + [Kind(min(64, max(counts)), 512), Kind(min(64, max(counts)), 4096)]
    num_pages = (max(counts) + 8) * (DEPTH // PAGE_SIZE + 4) + 4 * 4096 // PAGE_SIZE
    rank = open_rank(options.folder, max(counts) + 8, num_pages, 8192, options.attention, True, "auto")
    found: list[dict[str, object]] = []
    for kind in kinds:
        figures = measure(rank, kind, options.trace)
        print(kind.name, {name: round(value, 3) for name, value in figures.items()}, flush=True)
        found += rows(kind, figures)
    if options.out:
        options.out.write_text(json.dumps({"command": "tests/bench/gpu/step_trace.py", "rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
