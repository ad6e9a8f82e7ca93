"""FP8 GEMMs of both models' matrices at 1 to 8,192 rows: ours, torch's scaled GEMM, and bfloat16 beside them.

Ours are the kernels in Triton and those in CUDA C++; of the latter, one copies by TMA and is for more rows as well.

    python tests/bench/gpu/fp8_gemms.py --out FILE

Times are a call's share of a captured chain over weights that no cache holds; quantising the rows is not in them. Also
adds to the tuning table of this GPU the fastest tiles of Triton's kernel for up to 64 rows, and those of the CUDA
kernels that are right and faster than all else by more than the noise.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from plait_kernels.linear import Fp8Rows, Fp8Weight, Tile, fp8_gemm, gemv, quantise_rows, tuning_file
from plait_kernels.linear.fp8 import quantise_blocks, quantise_outputs
from plait_kernels.linear.fp8_gemm_cuda import Form, compile_for, tma_launch
from plait_kernels.linear.fp8_matrix import scaled_mm, takes_scaled_mm
from plait_kernels.linear.fp8_tiles import (
    CUDA_MAX_ROWS,
    TMA_MAX_ROWS,
    Fp8CudaTile,
    Fp8GemmTile,
    Fp8RowTile,
    Fp8TmaTile,
    Fp8WgmmaTile,
    cuda_key,
    tma_key,
)
from plait_kernels.linear.gemm_tuning import fp8_key
from torch import Tensor
from triton.runtime.errors import OutOfResources

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.gpu.gemm_tuning import CHAIN_BYTES, LEAST_GAIN, NUM_PROCESSES, PROGRAMS, chain_us, error
from bench.gpu.written_result import write_result

SHAPES = {
    "Qwen3-8B qkv": (6144, 4096),
    "Qwen3-8B output": (4096, 4096),
    "Qwen3-8B gate and up": (24_576, 4096),
    "Qwen3-8B down": (4096, 12_288),
    "V2-Lite q and kv_a": (3648, 2048),
    "V2-Lite output": (2048, 2048),
    "V2-Lite shared gate and up": (5632, 2048),
    "V2-Lite shared down": (2048, 2816),
    "Qwen3-8B qkv of 2 ranks": (3072, 4096),
    "Qwen3-8B output of 2 ranks": (4096, 2048),
    "Qwen3-8B gate and up of 2 ranks": (12_288, 4096),
    "Qwen3-8B down of 2 ranks": (4096, 6144),
}
"""Outputs and inputs."""
FORMATS = {"fp8": quantise_outputs, "fp8 blocks": quantise_blocks}
FEW = (8, 16, 32, 64)
MANY = (128, 256, 1024, 8192)
ROW_TILES = tuple(
    Fp8RowTile(*numbers) for numbers in ((2, 16, 2), (2, 16, 3), (1, 16, 4), (1, 16, 6), (4, 16, 1), (2, 8, 6))
)
WGMMA_TILES = {
    8: ((1, 6, 4), (1, 10, 2), (1, 20, 1), (2, 5, 2), (2, 10, 1), (3, 4, 2), (3, 8, 1)),
    16: ((1, 5, 4), (1, 10, 2), (1, 20, 1), (2, 5, 2), (2, 10, 1), (3, 4, 2), (3, 8, 1)),
    32: ((1, 8, 2), (2, 5, 2), (2, 9, 1), (3, 3, 2), (3, 7, 1)),
    64: ((1, 6, 2), (1, 12, 1), (2, 4, 2), (2, 8, 1), (3, 6, 1)),
}
"""Warpgroups, stages and blocks on a multiprocessor, by the most rows."""
TMA_TILES = {
    64: ((1, 6), (1, 14), (2, 9), (3, 7)),
    128: ((1, 8), (2, 7), (3, 5), (4, 4)),
    256: ((1, 5), (2, 4)),
}
"""Warpgroups and stages, by a tile's rows."""
MOST_ROWS_OF_BLOCKS, MOST_SHARED_BYTES = 128, 227 << 10
LEAST_BLOCKS, MOST_BLOCKS = 60, 211
"""Of a grid, the most for each block that fits a multiprocessor."""
OWN = ("own", "CUDA", "TMA")
"""Triton's, and those of CUDA C++."""
MOST_OFF = 2**-7
"""Two steps of bfloat16 in the largest value."""
BASES = ((64, 128, 3, 4), (64, 128, 5, 4), (128, 128, 3, 4), (128, 128, 4, 8), (64, 256, 3, 4), (128, 256, 3, 8))
"""Outputs, inputs, stages and warps of a tile for few rows."""
WIDE = ((128, 128, 3, 8), (128, 128, 4, 8), (128, 128, 4, 4), (64, 128, 4, 4))
"""For many."""
SPLITS = (1, 2, 4, 8)


class Job(NamedTuple):
    """A kernel to compile."""

    kind: str
    num_inputs: int
    num_rows: int
    tile: Tile


def tiles(kind: str, shape: tuple[int, int], num_rows: int) -> Iterator[Tile]:
    """Those that are tried; blocks have 128 inputs."""
    num_outputs, num_inputs = shape
    for outputs, inputs, stages, warps in BASES if num_rows <= FEW[-1] else WIDE:
        if kind == "fp8 blocks" and inputs > 128:
            continue
        for splits in SPLITS if num_rows <= FEW[-1] else (1,):
            programs = -(-num_outputs // outputs) * splits
            if num_inputs % (inputs * splits) == 0 and (splits == 1 or programs in PROGRAMS):
                yield Tile(outputs, inputs, splits, stages, warps)


def cuda_tiles(num_outputs: int, num_rows: int) -> Iterator[Fp8WgmmaTile]:
    """Those of the CUDA kernel that are tried."""
    for warpgroups, stages, blocks in WGMMA_TILES.get(num_rows, ()):
        for splits in SPLITS:
            num_blocks = -(-num_outputs // (64 * warpgroups)) * splits
            if (splits == 1 or num_blocks <= MOST_BLOCKS * blocks) and (splits == 8 or num_blocks >= LEAST_BLOCKS):
                yield Fp8WgmmaTile(num_rows, warpgroups, stages, blocks, splits)


def tma_tiles(form: Form, shape: tuple[int, int], num_rows: int) -> Iterator[Fp8TmaTile]:
    """The same of the one that copies by TMA."""
    for rows in TMA_TILES if num_rows in TMA_MAX_ROWS else ():
        if form.has_blocks and rows > MOST_ROWS_OF_BLOCKS:
            continue
        for warpgroups, stages in TMA_TILES[rows] if num_rows >= rows >= num_rows / 2 else ():
            for splits in range(1, 5):
                tile = Fp8TmaTile(rows, warpgroups, stages, splits)
                try:
                    launch = tma_launch(num_rows, shape, form, tile)
                except ValueError:
                    continue
                if LEAST_BLOCKS <= launch.blocks <= MOST_BLOCKS and launch.shared_bytes <= MOST_SHARED_BYTES:
                    yield tile


def compile_cuda_kernels() -> None:
    """All that are tried, at once."""
    tiles = [*ROW_TILES, *(Fp8WgmmaTile(rows, *each, 1) for rows, all in WGMMA_TILES.items() for each in all)]
    for quantise in FORMATS.values():
        compile_for(quantise(torch.zeros(64, 256, device="cuda")), tiles)
    copied = [Fp8TmaTile(rows, *each, 1) for rows, all in TMA_TILES.items() for each in all]
    compile_for(quantise_outputs(torch.zeros(64, 256, device="cuda")), copied)
    narrow = [tile for tile in copied if tile.rows <= MOST_ROWS_OF_BLOCKS]
    compile_for(quantise_blocks(torch.zeros(64, 256, device="cuda")), narrow)


def compile_ahead(job: Job) -> Job | None:
    """Into Triton's cache; None if the tile does not fit a multiprocessor."""
    weight = FORMATS[job.kind](torch.zeros(job.tile.outputs, job.num_inputs, device="cuda"))
    rows = quantise_rows(torch.zeros(job.num_rows, job.num_inputs, device="cuda"), is_grouped=weight.block_rows > 0)
    try:
        fp8_gemm(
            rows, weight, job.tile, torch.empty(job.num_rows, job.tile.outputs, dtype=torch.bfloat16, device="cuda")
        )
    except OutOfResources:
        return None
    return job


class Found(NamedTuple):
    """One way, timed."""

    way: str
    us: float
    error: float
    tile: Tile | Fp8CudaTile | None = None


def ways(
    kind: str, x_NI: Tensor, weights: Sequence[Fp8Weight], fits: frozenset[Job]
) -> Iterator[tuple[str, Callable[[Fp8Weight], Tensor], Tile | Fp8CudaTile | None]]:
    """Each way to multiply so many rows."""
    num_rows, num_inputs = x_NI.shape
    if num_rows == 1:
        yield "gemv", partial(_row, x_NI, None), None
        for row_tile in ROW_TILES:
            yield "CUDA", partial(_row, x_NI, row_tile), row_tile
        return
    rows = quantise_rows(x_NI, is_grouped=weights[0].block_rows > 0)
    out_NO = x_NI.new_empty(num_rows, weights[0].shape[0])
    for wgmma_tile in cuda_tiles(weights[0].shape[0], num_rows):
        yield "CUDA", partial(_own, rows, wgmma_tile, out_NO), wgmma_tile
    for tma_tile in tma_tiles(Form(weights[0].block_rows > 0), weights[0].shape, num_rows):
        yield "TMA", partial(_own, rows, tma_tile, out_NO), tma_tile
    for tile in tiles(kind, weights[0].shape, num_rows):
        if Job(kind, num_inputs, num_rows, tile) in fits:
            yield "own", partial(_own, rows, tile, out_NO), tile
    if takes_scaled_mm(weights[0]):
        for fast in (False,) if weights[0].block_rows else (False, True):
            yield f"scaled_mm{' fast' if fast else ''}", partial(_scaled, rows, out_NO, fast), None


def _row(x_1I: Tensor, tile: Fp8RowTile | None, weight: Fp8Weight) -> Tensor:
    return gemv(x_1I, weight, tile=tile)


def _own(rows: Fp8Rows, tile: Tile | Fp8GemmTile, out_NO: Tensor, weight: Fp8Weight) -> Tensor:
    return fp8_gemm(rows, weight, tile, out_NO)


def _scaled(rows: Fp8Rows, out_NO: Tensor, fast: bool, weight: Fp8Weight) -> Tensor:
    return scaled_mm(rows, weight, out_NO, use_fast_accum=fast)


def measure(kind: str, x_NI: Tensor, weights: Sequence[Fp8Weight], fits: frozenset[Job]) -> list[Found]:
    """Every way, the fastest of ours only: of the CUDA kernels' tiles, of those that are right."""
    given_NI = x_NI
    if len(x_NI) > 1:
        given_NI = quantise_rows(x_NI, is_grouped=weights[0].block_rows > 0).dequantised()
    dense_OI, found = weights[0].dequantised(), list[Found]()
    for way, call, tile in ways(kind, x_NI, weights, fits):
        try:
            off = error(call(weights[0]), given_NI, dense_OI)
        except RuntimeError as reason:
            print(f"  {way} {tile}: {str(reason).splitlines()[0][:150]}", flush=True)
            continue
        found.append(Found(way, chain_us(call, weights), off, tile))  # type: ignore[arg-type]
    best = [
        min(own, key=lambda each: each.us)
        for way in OWN
        if (own := [each for each in found if each.way == way and (way == "own" or each.error < MOST_OFF)])
    ]
    return [*best, *(each for each in found if each.way not in OWN)]


def add_to_table(
    table: dict[str, dict[str, list[int]]], weight: Fp8Weight, num_rows: int, found: Sequence[Found]
) -> None:
    """Triton's tile if it is faster than torch, and a CUDA kernel's if it is faster than all before it."""
    rest = sorted((each for each in found if each.way not in OWN[1:]), key=lambda each: each.us)
    if num_rows in FEW[1:] and rest and rest[0].tile is not None:
        table.setdefault(fp8_key(weight), {})[f"{num_rows}"] = list(dataclasses.astuple(rest[0].tile))
    least = rest[0].us if rest else float("inf")
    for way, key, measured in (("CUDA", cuda_key(weight), CUDA_MAX_ROWS), ("TMA", tma_key(weight), TMA_MAX_ROWS)):
        for own in found:
            if own.way == way and own.tile is not None and own.us < (1 - LEAST_GAIN) * least and num_rows in measured:
                table.setdefault(key, {})[f"{num_rows}"] = list(dataclasses.astuple(own.tile))
                least = own.us


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, *FEW, *MANY])
    options = parser.parse_args()
    jobs = {
        Job(kind, shape[1], num, tile)
        for shape in SHAPES.values()
        for kind in FORMATS
        for num in options.rows
        if num > 1
        for tile in tiles(kind, shape, num)
    }
    with ProcessPoolExecutor(NUM_PROCESSES, multiprocessing.get_context("spawn")) as pool:
        fits = frozenset(job for job in pool.map(compile_ahead, sorted(jobs, key=str), chunksize=4) if job)
    compile_cuda_kernels()
    rows, table = list[dict[str, object]](), dict[str, dict[str, list[int]]]()
    for name, (num_outputs, num_inputs) in SHAPES.items():
        num = min(16, max(2, CHAIN_BYTES // (num_outputs * num_inputs)))
        dense = [torch.randn(num_outputs, num_inputs, dtype=torch.bfloat16, device="cuda") * 0.02 for _ in range(num)]
        for num_rows in options.rows:
            x_NI = torch.randn(num_rows, num_inputs, dtype=torch.bfloat16, device="cuda")
            bfloat16 = partial(gemv, x_NI) if num_rows == 1 else partial(F.linear, x_NI)
            found = {"bfloat16": [Found("bfloat16", chain_us(bfloat16, dense), 0.0)]}
            for kind, quantise in FORMATS.items():
                weights = [quantise(each) for each in dense]
                found[kind] = measure(kind, x_NI, weights, fits)
                add_to_table(table, weights[0], num_rows, found[kind])
            for kind, each in ((kind, each) for kind, group in found.items() for each in group):
                rows += figures(f"{name}, {num_rows} rows, {kind}", each, num_rows, num_outputs, num_inputs)
                print(
                    f"{name} {num_rows} {kind:10} {each.way:14} {each.us:9.2f} us {each.error:.4f} {each.tile}",
                    flush=True,
                )
        del dense
    write_result(options.out, "fp8_gemms.py", rows)
    file = tuning_file(torch.cuda.get_device_name())
    known = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(known | table, indent=1) + "\n")


def figures(case: str, found: Found, num_rows: int, num_outputs: int, num_inputs: int) -> list[dict[str, object]]:
    """Of one way, as the results file has them."""
    numbers = "" if found.tile is None else f", tile {' '.join(map(str, dataclasses.astuple(found.tile)))}"
    way = f"{found.way}{numbers}"
    num_bytes = num_outputs * num_inputs * (2 if found.way == "bfloat16" else 1)
    values = (
        (way, "us", found.us),
        (f"{found.way} rate", "TFLOP/s", 2 * num_rows * num_outputs * num_inputs / found.us / 1e6),
        (f"{found.way} weights read", "TB/s", num_bytes / found.us / 1e6),
        (f"{found.way} error over the largest value", "share", found.error),
    )
    return [
        {"case": case, "metric": metric, "unit": unit, "value": round(value, 5), "goal": None}
        for metric, unit, value in values
    ]


if __name__ == "__main__":
    main()
