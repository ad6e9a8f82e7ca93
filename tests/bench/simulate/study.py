"""Mixed batching on a real trace: policies compared at loads from 50% to 110% of saturation.

    python tests/bench/simulate/study.py --trace azure_llm_2023_conv.csv --out tests/bench/results/simulate-azure.json

One replica. Saturation is the rate at which mixed steps answer the trace when all of it is there from the start; a
load is a share of that rate in the mean over the trace, so its peaks lie higher. Nothing is refused.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec
from msgspec.structs import replace
from plait.settings import SchedulerSettings
from plait.simulate.command import run
from plait.simulate.report import Summary
from plait.simulate.settings import ClusterSettings, LoadSettings, SimulateSettings

LOADS = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1)
ALL_AT_ONCE = 1e6
DEFAULTS = SimulateSettings()
UNBOUNDED = replace(DEFAULTS.scheduler, max_queue=1 << 20, max_queue_tokens=1 << 40)
POLICIES = {
    "mixed": UNBOUNDED,
    "mixed, 2048 tokens": replace(UNBOUNDED, max_batch_tokens=2048),
    "mixed, target 50 ms": replace(UNBOUNDED, itl_target_ms=50.0),
    "mixed, target 25 ms": replace(UNBOUNDED, itl_target_ms=25.0),
    "mixed off (prefill first)": replace(UNBOUNDED, mixed=False),
    # Prefill never joins a step that decodes: a target that nothing meets, and no grants.
    "decode first": replace(UNBOUNDED, itl_target_ms=0.001, prefill_starvation_steps=(1 << 32) - 1),
}


def settings(typed: argparse.Namespace, scheduler: SchedulerSettings, rate_scale: float) -> SimulateSettings:
    return SimulateSettings(
        load=LoadSettings(trace=typed.trace, rate_scale=rate_scale),
        cluster=ClusterSettings(hardware=typed.hardware, model=typed.model),
        scheduler=scheduler,
        pages=replace(DEFAULTS.pages, prefix_cache=typed.prefix_cache),
    )


def simulated(typed: argparse.Namespace, scheduler: SchedulerSettings, rate_scale: float) -> Summary:
    return run(settings(typed, scheduler, rate_scale), f"x{rate_scale:.2f}").summary


def saturation_scale(typed: argparse.Namespace) -> float:
    """The speed at which one replica can just answer the trace."""
    mixed = POLICIES["mixed"]
    whole = simulated(typed, mixed, ALL_AT_ONCE)
    recorded = simulated(typed, mixed, 1e-3).duration_seconds * 1e-3
    return recorded / whole.duration_seconds


def rows(case: str, summary: Summary) -> Iterator[dict[str, object]]:
    """One case's figures in the form of the result files."""
    for name, times in (
        ("ttft", summary.ttft_seconds),
        ("itl", summary.itl_seconds),
        ("e2e", summary.e2e_seconds),
    ):
        for percentile, seconds in msgspec.to_builtins(times).items():
            yield row(case, f"{name}_{percentile}", "seconds", seconds)
    yield row(case, "output_tokens_per_second", "tokens/s", summary.output_tokens_per_second)
    yield row(case, "mixed_share", "1", summary.mixed_share)
    yield row(case, "prefix_hit_ratio", "1", summary.prefix_hit_ratio)
    yield row(case, "num_preemptions", "1", summary.num_preemptions)
    yield row(case, "num_starvation_grants", "1", summary.num_starvation_grants)


def row(case: str, metric: str, unit: str, value: float) -> dict[str, object]:
    return {"case": case, "metric": metric, "unit": unit, "value": float(f"{value:.6g}"), "goal": None}


def line(load: str, policy: str, summary: Summary) -> str:
    """One case for readers: milliseconds, and output tokens a second."""
    ttft, itl = summary.ttft_seconds, summary.itl_seconds
    times = (ttft.p50, ttft.p99, itl.p50, itl.p99, itl.max)
    shown = " | ".join(f"{seconds * 1e3:,.0f}" if seconds >= 0.1 else f"{seconds * 1e3:.1f}" for seconds in times)
    return f"| {load} | {policy} | {shown} | {summary.output_tokens_per_second:,.0f} |"


def study(typed: argparse.Namespace) -> list[dict[str, object]]:
    saturation = saturation_scale(typed)
    found = [row("saturation", "rate_scale", "1", saturation)]
    for load in LOADS:
        for policy, scheduler in POLICIES.items():
            summary = simulated(typed, scheduler, saturation * load)
            found += rows(f"{policy} @ {load:.0%}", summary)
            print(line(f"{load:.0%}", policy, summary), flush=True)
    return found


def commit() -> str:
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def plait_version() -> str:
    try:
        return version("plait")
    except PackageNotFoundError:
        return "from a source tree"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", required=True)
    parser.add_argument("--hardware", default="h200")
    parser.add_argument("--model", default="qwen3-8b")
    parser.add_argument("--prefix-cache", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--out", type=Path, required=True)
    typed = parser.parse_args()
    result = {
        "commit": commit(),
        "command": f"tests/bench/simulate/study.py --trace {Path(typed.trace).name} --hardware {typed.hardware} "
        f"--model {typed.model} --{'' if typed.prefix_cache else 'no-'}prefix-cache",
        "machine": {"simulated": f"one replica of {typed.hardware}, in virtual time", "cpu": platform.machine()},
        "versions": {"plait": plait_version()},
        "rows": study(typed),
    }
    typed.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
