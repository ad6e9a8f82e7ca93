"""The table of steps that one mixed kernel takes, made of the figures of `mixed_attention.py`.

    python tests/bench/gpu/mixed_kernel.py

A kind of step is in it where one call took less time than two by more than the noise in the mean of its cases, and in
none of them more.
"""

from __future__ import annotations

import json
import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

from plait_worker.attention.mha.mixed_kernel import TABLE, Kind

FIGURES = Path(__file__).parents[1] / "results" / "gpu-mixed-attention.json"
WAYS = {"flashinfer": ("whole: fa3", "split: fa3, then fa2")}
"""By backend: one call, and two."""
NOISE = 0.03
_CASE = re.compile(r"heads \S+ (\d+) decode rows at (\d+), prompts (\d+)\S* behind \d+")


def kinds(rows: Iterable[Mapping[str, object]], whole: str, split: str) -> list[Kind]:
    """Decode rows, longest prompt and mean KV length of the steps that one call does faster."""
    times: defaultdict[str, dict[str, float]] = defaultdict(dict)
    for row in rows:
        if isinstance(row["value"], float):
            times[str(row["case"])][str(row["metric"])] = row["value"]
    ratios: defaultdict[Kind, list[float]] = defaultdict(list)
    for case, by_way in times.items():
        if (found := _CASE.match(case)) and whole in by_way and split in by_way:
            num_decode, kv_length, longest = map(int, found.groups())
            ratios[num_decode, longest, kv_length].append(by_way[whole] / by_way[split])
    return sorted(kind for kind, of_kind in ratios.items() if _wins(of_kind))


def _wins(ratios: list[float]) -> bool:
    return statistics.geometric_mean(ratios) < 1 - NOISE and max(ratios) <= 1


def table() -> dict[str, list[Kind]]:
    """As `plait_worker.attention.mha.mixed_kernel` reads it."""
    rows = json.loads(FIGURES.read_text())["rows"]
    return {backend: kinds(rows, *ways) for backend, ways in WAYS.items()}


def main() -> None:
    TABLE.write_text(json.dumps(table()) + "\n")


if __name__ == "__main__":
    main()
