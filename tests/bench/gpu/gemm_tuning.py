"""For each matrix of a model and each number of rows, the fastest of torch's GEMM and our skinny GEMM.

    python tests/bench/gpu/gemm_tuning.py --ranks 1 2 4 --out FILE

Times are a call's share of a captured chain over weights that no cache holds. Also adds to the tuning
table of this GPU (`gemm_tuning_DEVICE.json`) our tiles that are right and faster than torch by more than the noise.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import multiprocessing
import statistics
import sys
from collections.abc import Callable, Container, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from plait_kernels.linear import Tile, skinny_gemm, tuning_file
from torch import Tensor
from triton.runtime.errors import OutOfResources

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.gpu.written_result import write_result

COLUMN_PARALLEL = {"qkv": (6144, 4096), "gate and up": (24_576, 4096), "head": (151_936, 4096)}
ROW_PARALLEL = {"output": (4096, 4096), "down": (4096, 12_288)}
"""Outputs and inputs, of Qwen3-8B's shape."""
ROWS = (16, 32, 64)
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
NUM_PROCESSES = 15


Job = tuple[int, int, Tile]
"""Rows, inputs and the tile of a kernel."""


def tiles(num_outputs: int, num_inputs: int) -> Iterator[Tile]:
    """Those that are tried."""
    for (outputs, inputs, stages, warps), splits in itertools.product(BASES, SPLITS):
        tile = Tile(outputs, inputs, splits, stages, warps)
        num_programs = num_outputs // outputs * splits
        if tile.fits_matrix(num_outputs, num_inputs) and (
            num_programs in PROGRAMS or (splits == 1 and num_outputs > 99_999)
        ):
            yield tile


def matrices(num_ranks: int) -> dict[str, tuple[int, int]]:
    """Each matrix's shard of one rank."""
    of = "" if num_ranks == 1 else f" of {num_ranks} ranks"
    columns = {f"{name}{of}": (outputs // num_ranks, inputs) for name, (outputs, inputs) in COLUMN_PARALLEL.items()}
    rows = {f"{name}{of}": (outputs, inputs // num_ranks) for name, (outputs, inputs) in ROW_PARALLEL.items()}
    return columns | rows


def compile_ahead(job: Job) -> Job | None:
    """Into Triton's cache, by a GEMM of one tile's outputs; None if the tile does not fit a multiprocessor."""
    num_rows, num_inputs, tile = job
    x_NI, weight_OI = (
        torch.zeros(n, num_inputs, dtype=torch.bfloat16, device="cuda") for n in (num_rows, tile.outputs)
    )
    try:
        skinny_gemm(x_NI, weight_OI, tile)
    except OutOfResources:
        return None
    return job


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
    return float(statistics.median(times))


def error(given_NO: Tensor, x_NI: Tensor, weight_OI: Tensor) -> float:
    """Over the largest value, against float64."""
    right_NO = x_NI.double() @ weight_OI.double().T
    return float((given_NO.double() - right_NO).abs().max() / right_NO.abs().max())


@dataclass(frozen=True, slots=True)
class Measured:
    """One GEMM by torch and by the best of our tiles."""

    matrix: str
    shape: tuple[int, int]
    num_rows: int
    torch_us: float
    torch_error: float
    own_us: float
    own_error: float
    tile: Tile

    @property
    def wins(self) -> bool:
        """Whether our own is to be taken."""
        return self.own_us < (1 - LEAST_GAIN) * self.torch_us

    def rows(self) -> list[dict[str, object]]:
        """As the results file has them."""
        outputs, inputs = self.shape
        case = f"{self.matrix}, {outputs} x {inputs}, {self.num_rows} rows"
        tile = " ".join(map(str, dataclasses.astuple(self.tile)))
        values = (
            ("torch", "us", self.torch_us),
            (f"own, tile {tile}", "us", self.own_us),
            ("error of torch over the largest value", "share", self.torch_error),
            ("error of our own over the largest value", "share", self.own_error),
        )
        return [
            {"case": case, "metric": metric, "unit": unit, "value": round(value, 5), "goal": None}
            for metric, unit, value in values
        ]


def measure(matrix: str, num_rows: int, weights: Sequence[Tensor], fits: Container[Job]) -> Measured | None:
    """Torch and every tile that fits a processor; the best is one that rounds no worse than torch by half.

    None for a matrix that is no whole number of any tile: torch's GEMM computes it.
    """
    shape = (weights[0].shape[0], weights[0].shape[1])
    x_NI = torch.randn(num_rows, shape[1], dtype=torch.bfloat16, device="cuda")
    torch_error = error(F.linear(x_NI, weights[0]), x_NI, weights[0])
    found = []
    for tile in tiles(*shape):
        if (num_rows, shape[1], tile) in fits:
            own_error = error(skinny_gemm(x_NI, weights[0], tile), x_NI, weights[0])
            us = chain_us(functools.partial(_own, x_NI, tile), weights)
            found.append((own_error > 1.5 * torch_error, us, own_error, tile))
    if not found:
        return None
    is_wrong, own_us, own_error, tile = min(found, key=lambda each: each[:2])
    if is_wrong:
        raise SystemExit(f"{matrix}, {num_rows} rows: no tile is right; the best is off by {own_error}")
    torch_us = chain_us(lambda weight_OI: F.linear(x_NI, weight_OI), weights)
    return Measured(matrix, shape, num_rows, torch_us, torch_error, own_us, own_error, tile)


def _own(x_NI: Tensor, tile: Tile, weight_OI: Tensor) -> Tensor:
    return skinny_gemm(x_NI, weight_OI, tile)


def table(found: Sequence[Measured]) -> dict[str, dict[str, list[int]]]:
    """As `plait_kernels.linear` reads it: by the matrix's outputs and inputs, then by the most rows."""
    made: dict[str, dict[str, list[int]]] = {}
    for one in found:
        if one.wins:
            made.setdefault("x".join(map(str, one.shape)), {})[f"{one.num_rows}"] = list(dataclasses.astuple(one.tile))
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1], help="that divide the matrices")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    wanted = {name: shape for num_ranks in options.ranks for name, shape in matrices(num_ranks).items()}
    jobs = {(num, i, tile) for (o, i), num in itertools.product(wanted.values(), ROWS) for tile in tiles(o, i)}
    with ProcessPoolExecutor(NUM_PROCESSES, multiprocessing.get_context("spawn")) as pool:
        compiled = pool.map(compile_ahead, sorted(jobs, key=str), chunksize=4)
        fits = {job for job in compiled if job is not None}
    found = []
    for name, (num_outputs, num_inputs) in wanted.items():
        num = min(12, max(2, CHAIN_BYTES // (2 * num_outputs * num_inputs)))
        shape = (num_outputs, num_inputs)
        weights = [torch.randn(shape, dtype=torch.bfloat16, device="cuda") * 0.02 for _ in range(num)]
        for num_rows in ROWS:
            measured = measure(name, num_rows, weights, fits)
            print(measured or f"{name}, {shape}: no tile divides it", flush=True)
            if measured is not None:
                found.append(measured)
    write_result(options.out, "gemm_tuning.py", [row for one in found for row in one.rows()])
    file = tuning_file(torch.cuda.get_device_name())
    known = json.loads(file.read_text()) if file.exists() else {}
    for outputs, inputs in wanted.values():
        known.pop(f"{outputs}x{inputs}", None)
    file.write_text(json.dumps(known | table(found), indent=1) + "\n")


if __name__ == "__main__":
    main()
