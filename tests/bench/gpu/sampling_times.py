"""What sampling a token for each of many rows takes: tests/bench/gpu/sampling_times.py --out FILE."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch
from plait_kernels.sampling import Filters, sample_filtered, sample_greedy, sample_random, uniform
from torch import Tensor

VOCAB = 151_936
REPEATS = 20


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows: list[dict[str, object]] = []
    for num in (1, 64, 256):
        for spread, name in ((1.0, "flat"), (5.0, "peaked")):
            logits = (torch.randn(num, VOCAB, device="cuda") * spread).bfloat16()
            for way, work in ways(logits).items():
                case = f"{num} x {VOCAB}, {name}: {way}"
                rows.append({"case": case, "metric": "device", "unit": "us", "value": round(device_us(work), 1)})
                print(case, rows[-1]["value"], flush=True)
    if options.out:
        options.out.write_text(json.dumps({"command": "tests/bench/gpu/sampling_times.py", "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
