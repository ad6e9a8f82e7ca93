"""Sweep: one load at rising rates or concurrencies, to find a server's knee."""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec

from plait.bench.measure import Measured
from plait.bench.metrics import Metrics
from plait.bench.pace import ClosedLoop, OpenLoop, Pace, TraceReplay
from plait.errors import SettingsError

MAX_POINTS = 64
MOST_STREAMS = 1024
"""Highest concurrency of a sweep without given points."""
FALLS = 2
"""Such a sweep ends after this many points in a row below the best."""

MeasureAt = Callable[[float], Measured]


class Point(msgspec.Struct, frozen=True):
    """An offered load and its run."""

    load: float
    """Requests a second, or streams."""
    measured: Measured


def load_points(runs: list[Measured]) -> list[Point]:
    """The runs of the first server and seed by rate or concurrency. A replayed trace has neither."""
    first = [one for one in runs if (one.run.position, one.run.seed) == (runs[0].run.position, runs[0].run.seed)]
    points = [Point(load, one) for one in first if (load := _load(one.run.load.case.pace)) is not None]
    return sorted(points, key=lambda point: point.load)


def _load(pace: Pace) -> float | None:
    match pace:
        case ClosedLoop():
            return float(pace.num_streams)
        case OpenLoop():
            return pace.rate
        case TraceReplay():
            return None


def power(metrics: Metrics) -> float:
    """Throughput over latency (Kleinrock). It rises until more load adds more waiting than work."""
    e2e = metrics.latencies["e2e"]
    return metrics.requests_per_second / e2e.mean if e2e is not None else 0.0


def knee(points: list[Point]) -> Point:
    """The point of the greatest power."""
    return max(points, key=lambda point: power(point.measured.metrics))


def sweep(measure: MeasureAt, loads: list[float] | None, num_refined: int, whole: bool) -> list[Point]:
    """Measure at each of `loads`, or (None) at 1, 2, 4 ... until the power falls; then around the knee.

    Adds `num_refined` points between the knee and its neighbours. `whole` rounds loads to whole numbers. An
    interrupted run ends the sweep early.
    """
    points: list[Point] = []
    for load in loads if loads is not None else _doubling():
        points.append(Point(load, measure(load)))
        if points[-1].measured.run.is_partial:
            return points
        if loads is None and _has_fallen(points):
            break
    for _ in range(num_refined):
        between = _next_load_near_knee(sorted(points, key=lambda point: point.load), whole)
        if between is None:
            break
        points.append(Point(between, measure(between)))
        if points[-1].measured.run.is_partial:
            break
    return sorted(points, key=lambda point: point.load)


def read_loads(flag: str, words: str, most: float, whole: bool) -> list[float]:
    """Parse loads such as `1,2,4.5`, in rising order; raises `SettingsError`."""
    try:
        loads = sorted({float(word) for word in words.split(",")})
    except ValueError:
        loads = []
    is_fine = 0 < len(loads) <= MAX_POINTS and all(0 < load <= most and (not whole or load % 1 == 0) for load in loads)
    if not is_fine:
        kind = "whole numbers" if whole else "numbers"
        raise SettingsError(
            f"{flag} is {words!r}; allowed: up to {MAX_POINTS} {kind} over 0 and up to {most:g}, separated by commas"
        )
    return loads


def _doubling() -> list[float]:
    return [float(1 << step) for step in range(MOST_STREAMS.bit_length())]


def _has_fallen(points: list[Point]) -> bool:
    best = points.index(knee(points))
    return len(points) - 1 - best >= FALLS


def _next_load_near_knee(points: list[Point], whole: bool) -> float | None:
    """The geometric middle of the wider gap beside the knee; None if there is no load between."""
    at = points.index(knee(points))
    pairs = [(points[i].load, points[i + 1].load) for i in (at - 1, at) if 0 <= i < len(points) - 1]
    for low, high in sorted(pairs, key=lambda pair: pair[0] / pair[1]):
        middle = math.sqrt(low * high)
        middle = float(round(middle)) if whole else middle
        if low < middle < high:
            return middle
    return None


def knee_words(points: list[Point]) -> str:
    """`knee`, or a note that it may lie beyond: the power still rises at the heaviest load."""
    return "knee, or beyond it" if knee(points) is points[-1] else "knee"


def sweep_table(points: list[Point], unit: str) -> str:
    """One line for each load, with the knee marked."""
    head = (
        f"  {unit:>12}{'requests/s':>12}{'tokens/s':>12}{'TTFT p50':>12}{'TTFT p99':>12}{'ITL p99':>12}{'E2E p50':>12}"
    )
    marks = {knee(points).load: f"  <- {knee_words(points)}"}
    lines = [f"  {p.load:>12g}{_line(p.measured.metrics)}{marks.get(p.load, '')}" for p in points]
    foot = "  times in ms; the knee has the highest ratio of requests/s to mean E2E (Kleinrock's power)"
    return "\n".join([head, *lines, foot])


def _line(metrics: Metrics) -> str:
    ttft, itl, e2e = (metrics.latencies[name] for name in ("ttft", "itl", "e2e"))
    times = (ttft.p50 if ttft else None, ttft.p99 if ttft else None, itl.p99 if itl else None, e2e.p50 if e2e else None)
    shown = "".join(f"{'-' if time is None else f'{time * 1000:.1f}':>12}" for time in times)
    return f"{metrics.requests_per_second:>12.3f}{metrics.output_tokens_per_second:>12.1f}{shown}"
