"""Servers side by side: the same loads in alternation, and the ratios of their metrics over several seeds."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

import msgspec

from plait.bench.measure import Measured

METRICS = (
    "output_tokens_per_second",
    "requests_per_second",
    "goodput",
    "ttft_p50",
    "ttft_p99",
    "tpot_p50",
    "itl_p50",
    "itl_p99",
    "itl_max",
    "e2e_p50",
    "e2e_p99",
)


class Ratio(msgspec.Struct, frozen=True):
    """A metric of one server over that of the first, over all seeds."""

    case: str
    base: str
    server: str
    position: int
    """Index of the server on the command line."""
    metric: str
    median: float
    low: float
    high: float


def value(measured: Measured, metric: str) -> float | None:
    """A metric by its name in the results file; None if the run has none."""
    name, _, column = metric.rpartition("_")
    if name in measured.metrics.latencies:
        found = measured.metrics.latencies[name]
        return getattr(found, column) if found is not None else None
    direct: float | None = getattr(measured.metrics, metric)
    return direct


def ratios(runs: list[Measured]) -> list[Ratio]:
    """Ratios to the first server, for every case, metric and other server."""
    return [ratio for case in _cases(runs) for ratio in _ratios_of_case(case, [r for r in runs if _case(r) == case])]


def _case(measured: Measured) -> str:
    return measured.run.load.case.name


def _cases(runs: list[Measured]) -> list[str]:
    return list(dict.fromkeys(_case(one) for one in runs))


def _ratios_of_case(case: str, runs: list[Measured]) -> Iterator[Ratio]:
    base, *others = sorted({one.run.position for one in runs})
    urls = {one.run.position: one.run.server for one in runs}
    for other in others:
        for metric in METRICS:
            found = list(_paired(runs, metric, base, other))
            if found:
                median = statistics.median(found)
                yield Ratio(case, urls[base], urls[other], other, metric, median, min(found), max(found))


def _paired(runs: list[Measured], metric: str, base: int, other: int) -> Iterator[float]:
    by_run = {(one.run.position, one.run.seed): value(one, metric) for one in runs}
    for seed in dict.fromkeys(one.run.seed for one in runs):
        first, second = by_run.get((base, seed)), by_run.get((other, seed))
        if first and second is not None:
            yield second / first


def spread_table(runs: list[Measured]) -> str:
    """For each case: median, least and greatest over the seeds, and the ratios."""
    return "\n".join(
        line for case in _cases(runs) for line in _format_case(case, [r for r in runs if _case(r) == case])
    )


def _format_case(case: str, runs: list[Measured]) -> Iterator[str]:
    positions = sorted({one.run.position for one in runs})
    urls = {one.run.position: one.run.server for one in runs}
    num_seeds = len({one.run.seed for one in runs})
    yield f"{case}: median (least - greatest) of {num_seeds} seeds; times in ms"
    yield f"  {'':<26}" + "".join(f"{urls[position]:>34}" for position in positions) + _ratio_head(positions)
    found = {(ratio.position, ratio.metric): ratio for ratio in ratios(runs)}
    for metric in METRICS:
        cells = [_cell(metric, [one for one in runs if one.run.position == position]) for position in positions]
        row_ratios = [found.get((position, metric)) for position in positions[1:]]
        if any(cells):
            yield (
                f"  {metric:<26}"
                + "".join(f"{cell:>34}" for cell in cells)
                + "".join(_ratio_cell(r) for r in row_ratios)
            )


def _ratio_head(positions: list[int]) -> str:
    return "".join(f"{'ratio to the first':>26}" for _ in positions[1:])


def _cell(metric: str, runs: list[Measured]) -> str:
    values = [found for one in runs if (found := value(one, metric)) is not None]
    if not values:
        return ""
    is_time = metric.split("_")[0] in {"ttft", "tpot", "itl", "e2e"}
    scaled = [value * 1000 for value in values] if is_time else values
    return f"{statistics.median(scaled):.2f} ({min(scaled):.2f} - {max(scaled):.2f})"


def _ratio_cell(ratio: Ratio | None) -> str:
    return f"{f'{ratio.median:.3f} ({ratio.low:.3f} - {ratio.high:.3f})' if ratio else '':>26}"
