"""The scheduler under pressure: what each tenant gets in the simulator's scenarios and on public traces.

    python tests/bench/simulate/pressure.py --traces ../shared/data --out tests/bench/results/simulate-pressure.json

One replica of Qwen3-8B on an H200, with the queue limits of `plait serve`. Saturation is the rate at which the default
policy answers the load when all of it is there from the start. A load is a share of that rate, or with `--loads-of` of
the rate that another results file holds.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import msgspec
from msgspec.structs import replace
from plait.bench.result_file import Row, commit, machine, versions
from plait.settings import SchedulerSettings
from plait.simulate.command import run
from plait.simulate.report import Report, TenantSummary
from plait.simulate.settings import SCENARIOS, ClusterSettings, LoadSettings, SimulateSettings

LOADS = (0.5, 0.7, 0.9, 1.0, 1.1)
ALL_AT_ONCE = 1e6
DEFAULTS = SimulateSettings()
NUM_PROMPTS = 6_000
RATE = 10.0
"""Of the scenarios, before it is scaled to a load."""
MAX_MODEL_LEN = 140_000
CHOICES: dict[str, dict[str, object]] = {
    "fcfs": {},
    "fair": {"policy": "fair"},
    "priority": {"policy": "priority"},
    "priority that preempts": {"policy": "priority", "priority_preemption_threshold": 1},
    "target 30 ms": {"itl_target_ms": 30.0},
    "cache-aware": {"policy": "cache-aware"},
}
"""Settings to compare, by name. Those that this build does not have are left out."""
OF_LOAD = {
    "bursts": ("fcfs", "fair", "target 30 ms"),
    "agents": ("fcfs", "cache-aware"),
    "flood": ("fcfs", "fair"),
    "long-prompt": ("fcfs", "target 30 ms"),
    "priorities": ("fcfs", "priority", "priority that preempts"),
    "azure_llm_2023_conv.csv": ("fcfs", "fair", "target 30 ms"),
    "mooncake_conversation_first5000.jsonl": ("fcfs", "fair", "target 30 ms", "cache-aware"),
}
"""Which settings each load is run with."""
NUM_TRACE_TENANTS = 8


def known_choices() -> dict[str, SchedulerSettings]:
    """The settings that this build takes."""
    known = {}
    for name, fields in CHOICES.items():
        if not set(fields) <= set(SchedulerSettings.__struct_fields__):
            continue
        try:
            asked = msgspec.convert({**msgspec.to_builtins(DEFAULTS.scheduler), **fields}, SchedulerSettings)
        except msgspec.ValidationError:
            continue
        known[name] = asked
    return known


def simulated(trace: str, scale: float, scheduler: SchedulerSettings) -> Report:
    is_scenario = trace in SCENARIOS
    settings = SimulateSettings(
        load=LoadSettings(
            trace=trace,
            rate=RATE,
            num_prompts=NUM_PROMPTS,
            rate_scale=scale,
            tenants=None if is_scenario else NUM_TRACE_TENANTS,
        ),
        cluster=ClusterSettings(max_model_len=MAX_MODEL_LEN),
        scheduler=scheduler,
        pages=DEFAULTS.pages,
    )
    return run(settings, f"{Path(trace).stem} x{scale:.2f}")


def found_saturation(trace: str) -> float:
    """The factor on the load's rate at which it saturates."""
    scheduler = replace(DEFAULTS.scheduler, max_queue=1 << 20, max_queue_tokens=1 << 40)
    recorded = simulated(trace, 1e-3, scheduler).summary.duration_seconds * 1e-3
    return recorded / simulated(trace, ALL_AT_ONCE, scheduler).summary.duration_seconds


def rows(case: str, report: Report) -> Iterator[Row]:
    summary = report.summary
    yield from times(case, "", summary)
    yield Row(case, "output_tokens_per_second", "tokens/s", summary.output_tokens_per_second)
    yield Row(case, "prefix_hit_ratio", "1", summary.prefix_hit_ratio)
    yield Row(case, "computed_over_distinct", "1", summary.prefill_tokens.computed / summary.prefill_tokens.distinct)
    yield Row(case, "recomputed_share", "1", summary.prefill_tokens.recomputed / summary.prefill_tokens.computed)
    yield Row(case, "num_preemptions", "1", summary.num_preemptions)
    yield Row(case, "num_refused", "1", summary.num_refused)
    if len(report.tenants) > 1:
        shares = [each.fair_share for each in report.tenants]
        yield Row(case, "least_share_of_fair", "1", min(shares))
        yield Row(case, "greatest_share_of_fair", "1", max(shares))
    if case.startswith(SCENARIOS) and len(report.tenants) > 1:
        yield from tenant_rows(case, report.tenants)


def times(case: str, prefix: str, of: object) -> Iterator[Row]:
    for name in ("ttft", "itl"):
        for at in ("p50", "p99", "max"):
            yield Row(case, f"{prefix}{name}_{at}", "seconds", getattr(getattr(of, f"{name}_seconds"), at))


def tenant_rows(case: str, tenants: list[TenantSummary]) -> Iterator[Row]:
    """Each of a few tenants; of many, the largest and the worst of the others."""
    first, *others = sorted(tenants, key=lambda each: -each.num_requests)
    shown = (
        {f"tenant {each.tenant}": each for each in tenants} if len(tenants) <= 2 else {f"tenant {first.tenant}": first}
    )
    for name, each in shown.items():
        yield from times(f"{case}, {name}", "", each)
        yield Row(f"{case}, {name}", "share_of_fair", "1", each.fair_share)
        yield Row(f"{case}, {name}", "num_refused", "1", each.num_refused)
    if len(tenants) > 2:
        yield from worst_rows(f"{case}, worst of {len(others)} others", others)


def worst_rows(case: str, tenants: list[TenantSummary]) -> Iterator[Row]:
    for name in ("ttft", "itl"):
        for at in ("p50", "p99", "max"):
            worst = max(getattr(getattr(each, f"{name}_seconds"), at) for each in tenants)
            yield Row(case, f"{name}_{at}", "seconds", worst)
    yield Row(case, "num_refused", "1", sum(each.num_refused for each in tenants))


def line(case: str, report: Report) -> str:
    ttft, itl = report.summary.ttft_seconds, report.summary.itl_seconds
    shown = " | ".join(f"{each * 1e3:,.1f}" for each in (ttft.p50, ttft.p99, ttft.max, itl.p50, itl.p99, itl.max))
    return (
        f"| {case} | {shown} | {report.summary.output_tokens_per_second:,.0f} | {report.summary.prefix_hit_ratio:.1%} |"
    )


def noted_saturation(path: Path) -> dict[str, float]:
    """The saturations that a results file holds, by load."""
    rows = json.loads(path.read_bytes())["rows"]
    return {row["case"]: row["value"] for row in rows if row["metric"] == "saturation_scale"}


def measured(folder: Path, noted: dict[str, float]) -> Iterator[Row]:
    known = known_choices()
    for name, choices in OF_LOAD.items():
        trace = name if name in SCENARIOS else str(folder / name)
        found = found_saturation(trace)
        yield Row(Path(name).stem, "saturation_scale", "1", found)
        saturation = noted.get(Path(name).stem, found)
        for load in LOADS:
            for choice in (it for it in choices if it in known):
                report = simulated(trace, saturation * load, known[choice])
                case = f"{Path(name).stem} @ {load:.0%}, {choice}"
                print(line(case, report), flush=True)
                yield from rows(case, report)


def main() -> None:
    """Write the results file."""
    parser = argparse.ArgumentParser(description="Simulate loads that put the scheduler under pressure.")
    parser.add_argument("--traces", type=Path, required=True, help="folder of the public traces")
    parser.add_argument(
        "--loads-of", type=Path, help="results file whose loads to offer; without it, shares of the own"
    )
    parser.add_argument("--out", type=Path, required=True)
    typed = parser.parse_args()
    noted = noted_saturation(typed.loads_of) if typed.loads_of is not None else {}
    made = [replace(row, value=float(f"{row.value:.6g}")) for row in measured(typed.traces, noted)]
    report = {
        "commit": commit(),
        "command": "tests/bench/simulate/pressure.py",
        "machine": machine(),
        "versions": versions(),
        "rows": [msgspec.to_builtins(row) for row in made],
    }
    typed.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
