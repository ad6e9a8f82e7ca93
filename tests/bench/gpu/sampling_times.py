"""What sampling a token for each of many rows takes: tests/bench/gpu/sampling_times.py --out FILE."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch
from plait_kernels.sampling import (
    Adjustments,
    Filters,
    adjust_logits,
    mask_logits,
    sample_filtered,
    sample_greedy,
    sample_random,
    uniform,
)
from torch import Tensor

VOCAB = 151_936
REPEATS = 20
NUM_BIASES = 1024
"""Of a row that asks for all that may be asked for."""
GOALS = {(256, "penalties and 1,024 biases"): 120.0}
"""Microseconds, by rows and way."""


def device_us(work: Callable[[], object]) -> float:
    """Of one call in a captured graph."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    graph.replay()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(REPEATS):
        graph.replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1000 / REPEATS


def ways(logits: Tensor) -> dict[str, Callable[[], object]]:
    """Each sampling mode, with what it reads."""
    num = logits.shape[0]

    def column(value: float) -> Tensor:
        return torch.full((num,), value, device="cuda")

    seeds, indices, none = torch.arange(num, device="cuda"), torch.arange(num, device="cuda"), column(0).long()
    draws, cool = uniform(seeds, indices), column(0.7)

    def filtered(top_k: int, top_p: float) -> Callable[[], object]:
        filters = Filters(none + top_k, column(top_p), column(0.0))
        return lambda: sample_filtered(logits, cool, filters, draws)

    return {
        "greedy": lambda: sample_greedy(logits),
        "uniform numbers": lambda: uniform(seeds, indices),
        "temperature 0.7": lambda: sample_random(logits, cool, column(0.0), draws),
        "temperature 0.7, top_p 0.9": filtered(0, 0.9),
        "temperature 0.7, top_k 50": filtered(50, 1.0),
        "temperature 0.7, top_k 50, top_p 0.9": filtered(50, 0.9),
    }


def changes(num: int, num_biases: int) -> Adjustments:
    """Penalties of every row, each with its own counts: a tenth of the vocabulary was seen."""
    counts = torch.randint(0, 7, (num, VOCAB), device="cuda", dtype=torch.int32)
    counts *= torch.rand(num, VOCAB, device="cuda") < 0.1
    return Adjustments(
        counts_RV=counts,
        rows_S=torch.randperm(num, device="cuda"),
        penalties_S3=torch.rand(num, 3, device="cuda") + 0.5,
        ends_S=torch.arange(1, num + 1, device="cuda") * num_biases,
        ids_E=torch.cat([torch.randperm(VOCAB, device="cuda")[:num_biases] for _ in range(num)]),
        bias_E=torch.rand(num * num_biases, device="cuda") * 200 - 100,
        only_listed_S=torch.zeros(num, dtype=torch.bool, device="cuda"),
    )


def changing_ways(logits: Tensor) -> dict[str, Callable[[], object]]:
    """The passes over the rows that ask, before a token is sampled."""
    num = logits.shape[0]
    words = torch.randint(-(2**31), 2**31, (num, -(-VOCAB // 32)), device="cuda").to(torch.int32)
    rows = torch.randperm(num, device="cuda")
    penalties, all_of_it = changes(num, 0), changes(num, NUM_BIASES)
    return {
        "penalties": lambda: adjust_logits(logits, penalties),
        "penalties and 1,024 biases": lambda: adjust_logits(logits, all_of_it),
        "mask": lambda: mask_logits(logits, words, rows),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows: list[dict[str, object]] = []
    for num in (1, 64, 256):
        for spread, name in ((1.0, "flat"), (5.0, "peaked")):
            logits = (torch.randn(num, VOCAB, device="cuda") * spread).bfloat16()
            for way, work in (ways(logits) | changing_ways(logits)).items():
                case, goal = f"{num} x {VOCAB}, {name}: {way}", GOALS.get((num, way))
                value = round(device_us(work), 1)
                rows.append({"case": case, "metric": "device", "unit": "us", "value": value, "goal": goal})
                print(case, rows[-1]["value"], flush=True)
    if options.out:
        options.out.write_text(json.dumps({"command": "tests/bench/gpu/sampling_times.py", "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
