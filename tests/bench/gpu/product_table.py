"""For each matrix of a model and each number of rows, the fastest of torch's product and our own for few rows.

    python tests/bench/gpu/product_table.py --out FILE

Times are a call's share of a captured chain over weights that no cache holds. Prints the entries that
`plait_kernels.linear.table` keeps: tiles that are right and faster than torch by more than the noise.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import statistics
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
import torch.nn.functional as F
from plait.bench.record import commit, machine, versions
from plait_kernels.linear.few_triton import Tile, multiply_few
from torch import Tensor

MATRICES = {"qkv": (6144, 4096), "output": (4096, 4096), "gate and up": (24_576, 4096), "down": (4096, 12_288)}
MATRICES["head"] = (151_936, 4096)
"""Outputs and inputs, of Qwen3-8B's shape."""
ROWS = (8, 16, 32, 64)
BASES = (
    *((64, 64, 6, 4), (64, 128, 4, 4), (64, 256, 3, 4)),
    *((128, 64, 5, 4), (128, 128, 3, 8), (128, 128, 4, 4)),
)
"""Outputs, inputs, stages and warps of a tile."""
SPLITS = (1, 2, 4, 8)
PROGRAMS = range(100, 1300)
"""Fewer leave processors idle; more add sums for nothing."""
LEAST_GAIN = 0.03
CHAIN_BYTES = 600_000_000
NUM_PROCESSES = 12


def tiles(num_outputs: int, num_inputs: int) -> Iterator[Tile]:
    """Those that are tried."""
    for (outputs, inputs, stages, warps), splits in itertools.product(BASES, SPLITS):
        tile = Tile(outputs, inputs, splits, stages, warps)
        num_programs = num_outputs // outputs * splits
        if tile.takes(num_outputs, num_inputs) and (num_programs in PROGRAMS or (splits == 1 and num_outputs > 99_999)):
            yield tile


def compile_ahead(job: tuple[int, int, Tile]) -> None:
    """Into Triton's cache, by a product of one tile's outputs."""
    num_rows, num_inputs, tile = job
    x_NI, weight_OI = (
        torch.zeros(n, num_inputs, dtype=torch.bfloat16, device="cuda") for n in (num_rows, tile.outputs)
    )
    multiply_few(x_NI, weight_OI, tile)


def chain_us(call: Callable[[Tensor], object], weights: Sequence[Tensor]) -> float:
    """Microseconds of one call, median of five replays."""
    for weight_OI in weights[:2]:
        call(weight_OI)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for weight_OI in weights:
            call(weight_OI)
    graph.replay()
    times = []
    for _ in range(5):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / len(weights))
    return statistics.median(times)


def error(given_NO: Tensor, x_NI: Tensor, weight_OI: Tensor) -> float:
    """Over the largest value, against float64."""
    right_NO = x_NI.double() @ weight_OI.double().T
    return float((given_NO.double() - right_NO).abs().max() / right_NO.abs().max())


def measure(name: str, num_rows: int, weights: Sequence[Tensor]) -> list[dict[str, object]]:
    """Torch's time and error, then those of our best tile."""
    x_NI = torch.randn(num_rows, weights[0].shape[1], dtype=torch.bfloat16, device="cuda")
    torch_us = chain_us(lambda weight_OI: F.linear(x_NI, weight_OI), weights)
    torch_error = error(F.linear(x_NI, weights[0]), x_NI, weights[0])
    found = []
    for tile in tiles(*weights[0].shape):
        us = chain_us(lambda weight_OI, tile=tile: multiply_few(x_NI, weight_OI, tile), weights)  # type: ignore[misc]
        found.append((us, error(multiply_few(x_NI, weights[0], tile), x_NI, weights[0]), tile))
    best_us, best_error, best = min((each for each in found if each[1] <= 2 * torch_error), key=lambda each: each[0])
    wins = best_us < (1 - LEAST_GAIN) * torch_us
    print(
        name, tuple(weights[0].shape), num_rows, f"torch {torch_us:.1f} own {best_us:.1f}", best, "*" * wins, flush=True
    )
    case = f"{' x '.join(map(str, weights[0].shape))} ({name}), {num_rows} rows"
    values = (
        ("torch", "us", torch_us),
        ("own", "us", best_us),
        ("torch, error over the largest value", "share", torch_error),
        ("own, error over the largest value", "share", best_error),
    )
    tile_row = {"case": case, "metric": f"own: {best}", "unit": "wins", "value": int(wins), "goal": None}
    return [
        *(
            {"case": case, "metric": m, "unit": unit, "value": round(value, 5), "goal": None}
            for m, unit, value in values
        ),
        tile_row,
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    jobs = {(num, i, tile) for (o, i), num in itertools.product(MATRICES.values(), ROWS[1:]) for tile in tiles(o, i)}
    with ProcessPoolExecutor(NUM_PROCESSES, multiprocessing.get_context("spawn")) as pool:
        list(pool.map(compile_ahead, sorted(jobs, key=str), chunksize=4))
    rows: list[dict[str, object]] = []
    for name, (num_outputs, num_inputs) in MATRICES.items():
        num = min(12, max(2, CHAIN_BYTES // (2 * num_outputs * num_inputs)))
        shape = (num_outputs, num_inputs)
        weights = [torch.randn(shape, dtype=torch.bfloat16, device="cuda") * 0.02 for _ in range(num)]
        for num_rows in ROWS:
            rows += measure(name, num_rows, weights)
    result = {
        "commit": commit(),
        "command": "tests/bench/gpu/product_table.py",
        "machine": {"gpu": torch.cuda.get_device_name()} | machine(),
        "versions": versions(("plait", "torch", "triton")),
        "rows": rows,
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
