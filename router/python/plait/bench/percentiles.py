"""Mean, percentiles and maximum of a list of values."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec


class Summary(msgspec.Struct, frozen=True):
    """Mean, percentiles and maximum of some values, in their unit."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float


def percentile(ordered: Sequence[float], percent: float) -> float:
    """The percentile of ordered values, with linear interpolation.

    As numpy's default and `statistics.quantiles(method="inclusive")`.
    """
    place = (len(ordered) - 1) * percent / 100
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def summary(values: Sequence[float]) -> Summary | None:
    """The summary of `values`; None if there are none."""
    if not values:
        return None
    ordered = sorted(values)
    p50, p90, p99 = (percentile(ordered, percent) for percent in (50, 90, 99))
    return Summary(math.fsum(ordered) / len(ordered), p50, p90, p99, ordered[-1])
