"""GEMMs with 4-bit weights of Qwen3-8B's matrices and Qwen3-30B-A3B's experts, beside bfloat16, on one GPU.

    PYTHONPATH=kernels python tests/bench/gpu/int4_gemms.py --out FILE

It needs torch and Triton alone. First every candidate is compared with float64 of the weights' own definition; a wrong
one is named and not timed. Times are a call's share of a captured chain over weights that no cache holds. The last line
has what to add to the tuning table of this GPU (`gemm_tuning_DEVICE.json`); `--write` adds it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
from plait_kernels.linear import Tile, gemv, int4_gemm_cuda, int4_matrix, tuning_file
from plait_kernels.linear.gemm import int4_dequantise, int4_gemm
from plait_kernels.linear.gemm_tuning import int4_key
from plait_kernels.linear.int4 import FLOAT, INTEGER, Int4Weight, pack_int4
from plait_kernels.linear.int4_tiles import CudaTile, Int4Tile, SkinnyTile, WgmmaTile, cuda_key
from plait_kernels.moe import Experts, ExpertStack
from plait_kernels.moe.grouped_gemm_triton import Tile as GroupedTile
from plait_kernels.moe.int4_experts import Int4Experts, stack_int4
from plait_kernels.moe.int4_grouped_gemm_triton import expert_parts
from torch import Tensor
from triton.runtime.errors import OutOfResources

SHAPES = {
    "qkv": (6144, 4096),
    "output": (4096, 4096),
    "gate and up": (24_576, 4096),
    "down": (4096, 12_288),
}
"""Outputs and inputs, of Qwen3-8B."""
SHARDS = {
    f"{name}, {ranks} ranks": (num_outputs // ranks, num_inputs) if is_column else (num_outputs, num_inputs // ranks)
    for ranks in (2, 4)
    for (name, (num_outputs, num_inputs)), is_column in zip(SHAPES.items(), (True, False, True, False), strict=True)
}
"""What each of several ranks has."""
ROWS = (1, 8, 16, 32, 64, 128, 256, 512, 2048, 8192)
TRITON_ROWS = (1, 8, 16, 64, 256)
"""Of which the tuning table may have Triton's tiles."""
GROUP = 128
FEW_ROWS = tuple(
    SkinnyTile(*numbers)
    for numbers in (
        *((1, 8, 4, 3), (1, 8, 4, 2), (1, 8, 2, 4), (1, 16, 4, 1), (1, 16, 2, 2)),
        *((2, 8, 4, 2), (2, 8, 2, 2), (2, 16, 2, 1), (1, 4, 4, 6)),
    )
)
MANY_ROWS = {
    16: ((16, 1, 6, 3), (16, 1, 10, 2), (16, 2, 8, 2), (16, 4, 10, 1)),
    32: ((32, 1, 5, 3), (32, 1, 8, 2), (32, 2, 6, 2), (32, 4, 8, 1)),
    64: ((64, 1, 5, 2), (64, 2, 8, 1), (64, 3, 7, 1)),
    128: ((64, 2, 8, 1), (64, 3, 7, 1), (128, 1, 3, 2), (128, 2, 5, 1), (128, 3, 5, 1)),
    256: ((128, 2, 5, 1), (128, 3, 5, 1), (256, 1, 3, 1), (256, 2, 3, 1)),
    512: ((128, 3, 5, 1), (256, 1, 3, 1), (256, 2, 3, 1)),
    2048: ((128, 3, 5, 1), (256, 2, 3, 1)),
}
"""Rows, warpgroups, slots and blocks on a multiprocessor, by the most rows."""
CUDA_SPLITS = range(1, 9)
LEAST_BLOCKS = 60
"""Fewer leave multiprocessors idle."""
BASES = {
    8: ((64, 128, 6, 4), (64, 256, 4, 4), (64, 512, 3, 4), (128, 256, 3, 8)),
    16: ((64, 128, 6, 4), (64, 256, 4, 4), (128, 128, 5, 8), (128, 256, 3, 8)),
    64: ((64, 128, 5, 4), (128, 128, 4, 8), (128, 256, 3, 8), (256, 128, 3, 16)),
    128: ((64, 128, 3, 4), (128, 128, 3, 8), (128, 128, 4, 8), (256, 128, 3, 16)),
}
"""Outputs, inputs, stages and warps of a tile, by the rows of a tile."""
SPLITS = (1, 2, 4, 8)
PROGRAMS = range(60, 1400)
PANELS = (32 << 20, 64 << 20, 1 << 30)
"""Bytes that are de-quantised at a time."""
MOST_OFF = 2**-7
"""Two steps of bfloat16 in the largest value."""
CHAIN_BYTES = 400_000_000
NUM_PROCESSES = 15
EXPERTS = (128, 2048, 768)
"""Experts, hidden size and width of Qwen3-30B-A3B, of which a token has 8."""
TOP_K = 8
TOKENS = (1, 8, 64, 256, 1024)
GROUPED = (
    GroupedTile(8, 64, 256, 4, 4),
    GroupedTile(16, 64, 256, 4, 4),
    GroupedTile(16, 128, 256, 8, 3),
    GroupedTile(32, 128, 128, 8, 3),
    GroupedTile(64, 128, 128, 8, 3),
    GroupedTile(128, 128, 128, 8, 3),
)


class Job(NamedTuple):
    """A kernel to compile."""

    num_inputs: int
    num_rows: int
    tile: Tile


def row_tile(num_rows: int) -> int:
    """Of the tiles that are tried for so many rows."""
    return next((most for most in BASES if num_rows <= most), 128)


def tiles(num_outputs: int, num_inputs: int, num_rows: int) -> Iterator[Tile]:
    """Those that are tried."""
    for outputs, inputs, stages, warps in BASES[row_tile(num_rows)]:
        for splits in SPLITS if num_rows <= 64 else (1,):
            programs = num_outputs // outputs * splits
            if num_inputs % (inputs * splits) == 0 and (splits == 1 or programs in PROGRAMS):
                yield Tile(outputs, inputs, splits, stages, warps)


def cuda_tiles(num_outputs: int, num_inputs: int, num_rows: int) -> Iterator[CudaTile]:
    """Those of the CUDA kernels that are tried."""
    if num_rows <= 8 and num_rows * num_inputs <= 8 * 8192:
        yield from FEW_ROWS
    most = torch.cuda.get_device_properties(0).multi_processor_count
    for rows, warpgroups, slots, blocks in MANY_ROWS.get(max(16, num_rows), ()):
        panels = -(-num_outputs // (64 * warpgroups)) * -(-num_rows // rows)
        yield WgmmaTile(rows, warpgroups, slots, blocks, 0)
        for splits in CUDA_SPLITS:
            if panels * splits >= LEAST_BLOCKS and (splits == 1 or panels * splits <= most * blocks):
                yield WgmmaTile(rows, warpgroups, slots, blocks, splits)


def compile_cuda_kernels() -> None:
    """All that are tried, at once."""
    weight = random_weight(64, 4 * GROUP)
    tiles = [*FEW_ROWS, *(WgmmaTile(*numbers, 1) for each in MANY_ROWS.values() for numbers in each)]
    with ThreadPoolExecutor(NUM_PROCESSES) as pool:
        list(pool.map(lambda tile: int4_gemm_cuda.compile_for(weight, [tile]), tiles))


def random_weight(num_outputs: int, num_inputs: int, kind: str = INTEGER, group_size: int = GROUP) -> Int4Weight:
    """With zeros, if codes are integers."""
    num_groups = num_inputs // group_size
    code_OI = torch.randint(0, 16, (num_outputs, num_inputs), device="cuda", dtype=torch.uint8)
    scale_OG = (torch.rand(num_outputs, num_groups, device="cuda") * 0.01 + 0.002).half()
    zero_OG = torch.randint(5, 12, (num_outputs, num_groups), device="cuda") if kind == INTEGER else None
    weight = pack_int4(code_OI, scale_OG, zero_OG, kind)
    assert weight is not None
    return weight


def compile_ahead(job: Job) -> Job | None:
    """Into Triton's cache; None if the tile does not fit a multiprocessor."""
    weight, x_NI = random_weight(job.tile.outputs, job.num_inputs), rows_of(job.num_rows, job.num_inputs)
    try:
        int4_gemm(x_NI, weight, job.tile, x_NI.new_empty(job.num_rows, job.tile.outputs))
    except OutOfResources:
        return None
    return job


def compile_experts(tile: GroupedTile) -> GroupedTile | None:
    """The same for experts."""
    experts = random_experts(2, INTEGER, GROUP)
    chosen_TK = torch.zeros(4, TOP_K, dtype=torch.int64, device="cuda")
    try:
        expert_parts(rows_of(4, EXPERTS[1]), experts.gate_up_EJH, experts.down_EHI, chosen_TK, 1.0, tile)
    except OutOfResources:
        return None
    return tile


def rows_of(num_rows: int, num_inputs: int) -> Tensor:
    return torch.randn(num_rows, num_inputs, dtype=torch.bfloat16, device="cuda")


def chain_us(call: Callable[[Any], object], held: Sequence[object]) -> float:
    """Microseconds of one call, median of five replays."""
    for each in held[:2]:
        call(each)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for each in held:
            call(each)
    graph.replay()
    times = []
    for _ in range(5):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / len(held))
    return float(statistics.median(times))


class Found(NamedTuple):
    """One way, timed."""

    way: str
    us: float
    tile: Int4Tile | None = None

    @property
    def name(self) -> str:
        """Of the way, with its tile."""
        return self.way if self.tile is None else f"{self.way}, tile {' '.join(map(str, numbers_of(self.tile)))}"


def numbers_of(tile: Int4Tile) -> tuple[int, ...]:
    """As the table has them."""
    return dataclasses.astuple(tile)


def off_by(given: Tensor, right: Tensor) -> float:
    return float((given.double() - right).abs().max() / right.abs().max())


def measure(x_NI: Tensor, weights: Sequence[Int4Weight], fits: frozenset[Job]) -> list[Found]:
    """Every way that is right, the fastest of each kind first."""
    num_rows, shape = len(x_NI), weights[0].shape
    few_NI = x_NI[:256]
    right_NO = few_NI.double() @ weights[0].dequantised().double().T
    out_NO, found = x_NI.new_empty(num_rows, shape[0]), list[Found]()
    for way, call, tile in ways(x_NI, weights[0], out_NO, fits):
        call(weights[0])
        if not (off := off_by(out_NO[:256], right_NO)) < MOST_OFF:
            print(f"WRONG {shape} {num_rows} rows {way} {tile}: off by {off}", flush=True)
            continue
        found.append(Found(way, chain_us(call, weights), tile))
    return sorted(found, key=lambda each: each.us)


def ways(
    x_NI: Tensor, weight: Int4Weight, out_NO: Tensor, fits: frozenset[Job]
) -> Iterator[tuple[str, Callable[[Int4Weight], object], Int4Tile | None]]:
    """Each way to multiply so many rows."""
    num_rows = len(x_NI)
    for own in cuda_tiles(*weight.shape, num_rows):
        yield "CUDA", partial(_fused, x_NI, own, out_NO), own
    for tile in tiles(*weight.shape, num_rows):
        if Job(weight.num_inputs, row_tile(num_rows), tile) in fits:
            yield "fused", partial(_fused, x_NI, tile, out_NO), tile
    if num_rows >= 64:
        for panel_bytes in PANELS:
            yield f"de-quantised by {panel_bytes >> 20} MiB", partial(_dequantised, x_NI, panel_bytes, out_NO), None


def _fused(x_NI: Tensor, tile: Int4Tile, out_NO: Tensor, weight: Int4Weight) -> Tensor:
    return int4_gemm(x_NI, weight, tile, out_NO)


def _dequantised(x_NI: Tensor, panel_bytes: int, out_NO: Tensor, weight: Int4Weight) -> Tensor:
    int4_matrix.PANEL_BYTES = panel_bytes
    return int4_matrix.dequantised_matmul(x_NI, weight, out_NO)


def _whole(out_OI: Tensor, weight: Int4Weight) -> Tensor:
    return int4_dequantise(weight, range(len(out_OI)), out_OI)


def bfloat16_us(x_NI: Tensor, dense: Sequence[Tensor]) -> float:
    return chain_us(partial(gemv, x_NI) if len(x_NI) == 1 else partial(F.linear, x_NI), dense)


def measure_matrices(
    shapes: Mapping[str, tuple[int, int]], rows: Sequence[int], fits: frozenset[Job], deadline: float
) -> tuple[list[dict[str, object]], dict[str, Any]]:
    """Rows of the results file, and of the tuning table."""
    results, table = list[dict[str, object]](), dict[str, dict[str, list[int]]]()
    for name, (num_outputs, num_inputs) in shapes.items():
        num = min(24, max(3, CHAIN_BYTES // (num_outputs * num_inputs // 2)))
        weights = [random_weight(num_outputs, num_inputs) for _ in range(num)]
        dense = [each.dequantised().bfloat16() for each in weights[: max(3, num // 4)]]
        panel_OI = torch.empty_like(dense[0])
        int4_dequantise(weights[0], range(num_outputs), panel_OI)
        if not torch.equal(panel_OI, dense[0]):
            print(f"WRONG {name}: de-quantised weights differ", flush=True)
        us = chain_us(partial(_whole, panel_OI), weights)
        print(f"{name} {num_outputs}x{num_inputs}: de-quantise {us:.1f} us", flush=True)
        for num_rows in rows:
            if time.monotonic() > deadline:
                print("out of time", flush=True)
                return results, table
            x_NI = rows_of(num_rows, num_inputs)
            base_us, found = bfloat16_us(x_NI, dense), measure(x_NI, weights, fits)
            if not found:
                continue
            add_to_table(table, weights[0], num_rows, found)
            best, others = found[0], [each for each in found if each.tile is None]
            shown = " | ".join(f"{each.name} {each.us:.1f}" for each in (*found[:4], *others))
            rate = num_outputs * num_inputs * (0.5 + 3 / GROUP) / best.us / 1e6
            print(
                f"{name} {num_rows}: bf16 {base_us:.1f}, {base_us / best.us:.2f}x, {rate:.2f} TB/s | {shown}",
                flush=True,
            )
            results += figures(f"{name}, {num_rows} rows", base_us, found)
        del weights, dense
    return results, table


def add_to_table(
    table: dict[str, dict[str, list[int]]], weight: Int4Weight, num_rows: int, found: Sequence[Found]
) -> None:
    """The fastest tile of CUDA's kernels if it is the fastest way, and of Triton's if only those are faster."""
    rest = [each for each in found if not isinstance(each.tile, CudaTile)]
    if found[0] not in rest and found[0].tile is not None:
        table.setdefault(cuda_key(weight), {})[str(num_rows)] = list(numbers_of(found[0].tile))
    if num_rows in TRITON_ROWS and rest and rest[0].tile is not None:
        table.setdefault(int4_key(weight), {})[str(num_rows)] = list(numbers_of(rest[0].tile))


def figures(case: str, base_us: float, found: Sequence[Found]) -> list[dict[str, object]]:
    """As the results file has them."""
    rows = [("bfloat16", base_us), *((each.name, each.us) for each in found)]
    return [{"case": case, "metric": way, "unit": "us", "value": round(us, 3), "goal": None} for way, us in rows]


def random_experts(num: int, kind: str, group_size: int) -> Int4Experts:
    _, hidden, width = EXPERTS
    return stack_int4(
        (random_weight(2 * width, hidden, kind, group_size), random_weight(hidden, width, kind, group_size))
        for _ in range(num)
    )


def measure_experts(fits: Sequence[GroupedTile], kind: str, group_size: int) -> list[dict[str, object]]:
    """Beside bfloat16's kernels for so many tokens."""
    num, hidden, _ = EXPERTS
    experts, results = random_experts(num, kind, group_size), list[dict[str, object]]()
    gate_up, down = (
        torch.stack([each.one(i).dequantised().bfloat16() for i in range(num)])
        for each in (experts.gate_up_EJH, experts.down_EHI)
    )
    dense = ExpertStack(gate_up, down)
    for num_tokens in TOKENS:
        x_TH, weights_TK = rows_of(num_tokens, hidden), torch.rand(num_tokens, TOP_K, device="cuda")
        chosen = [torch.rand(num_tokens, num, device="cuda").argsort(dim=1)[:, :TOP_K].contiguous() for _ in range(8)]
        right_TH = dense(x_TH, weights_TK, chosen[0]).double()
        off = off_by(experts(x_TH, weights_TK, chosen[0]), right_TH)
        if not off < 2**-5:
            print(f"WRONG experts {kind} {num_tokens} tokens: off by {off}", flush=True)
        base_us = chain_us(partial(_experts, dense, x_TH, weights_TK), chosen)
        pairs = num_tokens * TOP_K / num
        own = [("all, as chosen", chain_us(partial(_experts, experts, x_TH, weights_TK), chosen))]
        for tile in fits:
            call = partial(_parts, experts, x_TH, pairs, tile)
            name = " ".join(map(str, dataclasses.astuple(tile)))
            own.append((f"both GEMMs by {name}", chain_us(call, chosen)))
        own.sort(key=lambda each: each[1])
        shown = " | ".join(f"{way} {us:.1f}" for way, us in own)
        print(f"experts {kind} {num_tokens}: bf16 {base_us:.1f} | {shown}", flush=True)
        for way, us in (("bfloat16", base_us), *own):
            case = {"case": f"experts {kind}, {num_tokens} tokens", "metric": way, "unit": "us", "goal": None}
            results.append(case | {"value": round(us, 3)})
    return results


def _experts(experts: Experts, x_TH: Tensor, weights_TK: Tensor, chosen_TK: Tensor) -> Tensor:
    return experts(x_TH, weights_TK, chosen_TK)


def _parts(experts: Int4Experts, x_TH: Tensor, pairs: float, tile: GroupedTile, chosen_TK: Tensor) -> Tensor:
    return expert_parts(x_TH, experts.gate_up_EJH, experts.down_EHI, chosen_TK, pairs, tile)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=140, help="after which no further shape is begun")
    parser.add_argument("--shards", action="store_true", help="the matrices of 2 and 4 ranks instead")
    parser.add_argument(
        "--cuda-only", action="store_true", help="leave out Triton's tiles and experts: not for the table"
    )
    parser.add_argument("--rows", type=int, nargs="+", choices=ROWS, default=ROWS, help="only these numbers of rows")
    parser.add_argument("--write", action="store_true", help="add the fastest tiles to this GPU's tuning table")
    options = parser.parse_args()
    begun = time.monotonic()
    compile_cuda_kernels()
    print(f"CUDA kernels compiled: {time.monotonic() - begun:.0f} s", flush=True)
    shapes = SHARDS if options.shards else SHAPES
    jobs = {
        Job(inputs, row_tile(num), tile)
        for outputs, inputs in ({} if options.cuda_only else shapes).values()
        for num in options.rows
        for tile in tiles(outputs, inputs, num)
    }
    with ProcessPoolExecutor(NUM_PROCESSES, multiprocessing.get_context("spawn")) as pool:
        grouped = pool.map(compile_experts, () if options.cuda_only or options.shards else GROUPED)
        fits = frozenset(job for job in pool.map(compile_ahead, sorted(jobs, key=str), chunksize=2) if job)
        grouped_fits = [tile for tile in grouped if tile is not None]
    print(f"{torch.cuda.get_device_name()}: {len(fits)} of {len(jobs)} kernels fit, {time.monotonic() - begun:.0f} s")
    results, table = measure_matrices(shapes, options.rows, fits, begun + options.seconds)
    for kind, group_size in ((INTEGER, GROUP), (FLOAT, 32)):
        if grouped_fits and time.monotonic() < begun + options.seconds:
            results += measure_experts(grouped_fits, kind, group_size)
    result = {
        "commit": subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip(),
        "command": " ".join(["tests/bench/gpu/int4_gemms.py", *sys.argv[1:]]),
        "machine": {"gpu": torch.cuda.get_device_name()},
        "versions": {"torch": torch.__version__, "triton": triton.__version__, "cuda": torch.version.cuda},
        "rows": results,
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print("table entries:", json.dumps(table))
    if options.write:
        file = tuning_file(torch.cuda.get_device_name())
        known = json.loads(file.read_text()) if file.exists() else {}
        known |= {key: known.get(key, {}) | entry for key, entry in table.items()}
        file.write_text(json.dumps(known, indent=1) + "\n")
    print(f"{time.monotonic() - begun:.0f} s")


if __name__ == "__main__":
    main()
