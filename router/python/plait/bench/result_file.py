"""The results file: `{commit, command, machine, versions, rows, runs}` as JSON."""

from __future__ import annotations

import platform
import subprocess
from collections import Counter
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec

from plait.bench.compare import Ratio
from plait.bench.measure import Measured
from plait.bench.messages import Outcome
from plait.bench.metrics import timed_request
from plait.bench.run import Run
from plait.bench.table import notes

LIBRARIES = ("plait", "uvloop", "httptools", "msgspec")
_UNITS = {
    "duration": "seconds",
    "num_completed": "requests",
    "requests_per_second": "requests/s",
    "output_tokens_per_second": "tokens/s",
    "prompt_tokens_per_second": "tokens/s",
    "total_tokens_per_second": "tokens/s",
    "peak_output_tokens_per_second": "tokens/s",
    "peak_concurrency": "requests",
    "mean_concurrency": "requests",
    "goodput": "requests/s",
}


class Row(msgspec.Struct, frozen=True):
    """One metric of one case."""

    case: str
    metric: str
    unit: str
    value: float
    goal: float | None = None


def case_name(measured: Measured) -> str:
    """The name of a run in the rows."""
    run = measured.run
    return f"{run.load.case.name} | {run.server} | seed {run.seed}"


def rows(measured: Measured) -> list[Row]:
    """The metrics of one run, times in seconds."""
    case, metrics = case_name(measured), measured.metrics
    made = [
        Row(case, metric, unit, float(value))
        for metric, unit in _UNITS.items()
        if (value := getattr(metrics, metric)) is not None
    ]
    made.append(Row(case, "num_failed", "requests", float(sum(metrics.failures.values()))))
    latencies = {**metrics.latencies, "wait": metrics.wait}
    for name, found in latencies.items():
        if found is not None:
            made += [Row(case, f"{name}_{k}", "seconds", v) for k, v in msgspec.structs.asdict(found).items()]
    late = msgspec.structs.asdict(measured.client_lag)
    made += [
        Row(case, f"client_{name}", "share" if name.endswith("share") else "seconds", late[name])
        for name in ("lag_p99", "lag_max", "send_p99", "send_max", "idle_share", "cpu_share")
    ]
    return made


def record(command: str, runs: list[Measured], ratios: list[Ratio], with_requests: bool) -> dict[str, object]:
    """The content of the results file."""
    compared = [
        Row(f"{ratio.case} | {ratio.server} over {ratio.base}", f"ratio_{ratio.metric}_{name}", "ratio", value)
        for ratio in ratios
        for name, value in (("median", ratio.median), ("min", ratio.low), ("max", ratio.high))
    ]
    return {
        "commit": commit(),
        "command": command,
        "machine": machine(),
        "versions": versions(),
        "rows": [row for measured in runs for row in rows(measured)] + compared,
        "runs": [_describe(measured, with_requests) for measured in runs],
    }


def _describe(measured: Measured, with_requests: bool) -> dict[str, object]:
    run = measured.run
    described: dict[str, object] = {
        "case": case_name(measured),
        "pace": run.load.case.pace,
        "model": run.model,
        "is_valid": not measured.client_lag.reasons,
        "invalid_because": measured.client_lag.reasons,
        "is_partial": run.is_partial,
        "counted_by": run.counting,
        "failures": measured.metrics.failures,
        "failure_examples": {one.failure: one.detail for one in run.outcomes if one.failure is not None},
        "finish_reasons": Counter(one.finish_reason or "none" for one in run.outcomes if one.failure is None),
        "notes": notes([measured], None),
    }
    if measured.streams:
        described["streams"] = measured.streams
    if with_requests:
        described["requests"] = _requests(measured)
    return described


def _requests(measured: Measured) -> list[dict[str, object]]:
    run = measured.run
    return [
        {
            "index": one.index,
            "intended": one.intended - run.begun,
            "sent": one.taken - run.begun,
            "ended": one.ended - run.begun,
            "failure": one.failure,
            "arrivals": [time - run.begun for time in one.arrivals],
            "tokens": list(one.tokens),
            **({} if one.failure is not None else _latencies(run, one)),
        }
        for one in sorted(run.outcomes, key=lambda outcome: outcome.index)
    ]


def _latencies(run: Run, outcome: Outcome) -> dict[str, object]:
    timed = timed_request(run, outcome)
    return {name: getattr(timed, name) for name in ("num_prompt_tokens", "num_output_tokens", "ttft", "tpot", "e2e")}


def commit() -> str | None:
    """Commit of the source tree that runs; None for an installed package."""
    here = Path(__file__).parent
    try:
        command = ["git", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        found = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.stdout.strip()


def machine() -> dict[str, object]:
    """Processor, cores and system of the client."""
    cpus = Path("/proc/cpuinfo")
    lines = cpus.read_text(encoding="utf-8").splitlines() if cpus.exists() else []
    model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
    cores = sum(line.startswith("processor") for line in lines)
    return {"cpu": model, "cores": cores, "system": platform.platform()}


def versions(libraries: Iterable[str] = LIBRARIES) -> dict[str, str]:
    """Versions of Python and of `libraries`, without those that are not installed."""
    found = {"python": platform.python_version()}
    for library in libraries:
        try:
            found[library] = version(library)
        except PackageNotFoundError:
            continue
    return found
