"""DeepSeek-V2-Lite's experts in FP8 by each tile, beside bfloat16: which is fastest for how many tokens.

    python tests/bench/gpu/mla/fp8_experts.py [--tiles] [--seconds 90] --out FILE

Times are whole calls of both GEMMs, rows quantised within. `--tiles` tries every tile of the lists of pairs. Up to
`MOST_FEW` pairs an expert the gate is also tried within the first GEMM.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from plait_kernels.linear import quantise_rows
from plait_kernels.linear.fp8 import Fp8Weight, quantise_blocks, quantise_outputs
from plait_kernels.moe import (
    GroupLimit,
    Routing,
    fp8_gated_gemm_triton,
    fp8_grouped_gemm_triton,
    grouped_gemm_torch,
    grouped_gemm_triton,
    route,
)
from plait_kernels.moe.fp8_experts import Fp8Experts, stack_fp8
from plait_kernels.moe.grouped_gemm_triton import Tile, combine, list_pairs
from triton.runtime.errors import OutOfResources

sys.path.insert(0, str(Path(__file__).parents[3]))

from bench.gpu.mla.decode_layers import microseconds
from bench.gpu.written_result import write_result

NUM_EXPERTS, NUM_SHARED, TOP_K, HIDDEN, WIDTH = 64, 2, 6, 2048, 1408
TOKENS = (4, 16, 64, 256, 512, 1024, 2048, 4096, 8192)
KINDS: dict[str, Callable[[torch.Tensor], Fp8Weight]] = {"outputs": quantise_outputs, "blocks": quantise_blocks}
TILES = (
    Tile(16, 64, 128, 4, 4),
    Tile(16, 128, 128, 4, 3),
    Tile(16, 128, 128, 4, 5),
    Tile(16, 128, 256, 4, 3),
    Tile(32, 64, 128, 4, 4),
    Tile(32, 128, 128, 4, 3),
    Tile(64, 128, 128, 4, 3),
    Tile(64, 128, 128, 4, 4),
    Tile(64, 256, 128, 8, 3),
    Tile(128, 128, 128, 4, 4),
    Tile(128, 128, 128, 8, 3),
    Tile(128, 128, 128, 8, 4),
    Tile(128, 256, 128, 8, 3),
)
MOST_FEW, BEFORE = 64, Tile(16, 128, 128, 4, 3)
"""That tile was the fastest for few rows with the gate apart."""
FEW_TILES = (
    Tile(16, 128, 128, 4, 3),
    Tile(16, 128, 128, 4, 4),
    Tile(16, 128, 128, 8, 3),
    Tile(32, 128, 128, 4, 3),
    Tile(32, 128, 128, 8, 3),
    Tile(64, 128, 128, 8, 3),
)
"""Of the GEMM with the gate and of the one after it."""
Given = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def experts_of(kind: str) -> Fp8Experts:
    """Random ones."""

    def one(*size: int) -> Fp8Weight:
        return KINDS[kind](torch.randn(size, device="cuda") * 0.02)

    return stack_fp8((one(2 * WIDTH, HIDDEN), one(HIDDEN, WIDTH)) for _ in range(NUM_EXPERTS + NUM_SHARED))


def listed(experts: Fp8Experts, given: Given, tile: Tile) -> torch.Tensor:
    """By lists of pairs with a tile, the gate apart."""
    x_TH, weights_TK, experts_TK = given
    fp8_grouped_gemm_triton.tile_for = lambda *_, **given: tile
    parts = fp8_grouped_gemm_triton.expert_parts(x_TH, experts.gate_up_EJH, experts.down_EHI, experts_TK, math.inf)
    out_TH = torch.empty_like(x_TH)
    combine(parts, weights_TK, out_TH)
    return out_TH


def tile_times(experts: Fp8Experts, given: Given, tiles: tuple[Tile, ...]) -> Iterator[tuple[str, float]]:
    """Microseconds of each tile that fits."""
    for tile in tiles:
        try:
            yield f"lists, tile {tile}", microseconds(partial(listed, experts, given, tile), 10)
        except OutOfResources:
            continue


def gated(experts: Fp8Experts, given: Given, tiles: tuple[Tile, Tile]) -> torch.Tensor:
    """The gate in the first GEMM."""
    x_TH, weights_TK, experts_TK = given
    gate_up, down = experts.gate_up_EJH, experts.down_EHI
    lists = (*list_pairs(experts_TK, len(down.stored_OI)), len(x_TH))
    rows = quantise_rows(x_TH, is_grouped=gate_up.block_rows > 0)
    parts, out_TH = x_TH.new_empty(experts_TK.numel(), x_TH.shape[1]), torch.empty_like(x_TH)
    gated = fp8_gated_gemm_triton.gated_rows(rows, gate_up, lists, experts_TK.shape[1], tiles[0])
    fp8_gated_gemm_triton.down_parts(gated, down, lists, parts, tiles[1])
    combine(parts, weights_TK, out_TH)
    return out_TH


def gated_times(experts: Fp8Experts, given: Given, *, tries_all: bool) -> Iterator[tuple[str, float]]:
    """Microseconds with the tiles in use, and with each other one of either GEMM."""
    used = fp8_gated_gemm_triton.GATE_UP, fp8_gated_gemm_triton.DOWN
    others = [(tile, used[1]) for tile in FEW_TILES] + [(used[0], tile) for tile in FEW_TILES]
    for tiles in dict.fromkeys((used, *(others if tries_all else ()))):
        try:
            yield f"gated, tiles {tiles}", microseconds(partial(gated, experts, given, tiles), 10)
        except OutOfResources:
            continue


def of_bfloat16(given: Given, stacks: tuple[torch.Tensor, torch.Tensor]) -> Iterator[tuple[str, float]]:
    """Of the same experts in bfloat16."""
    call = partial(grouped_gemm_triton.expert_mlps, given[0], *stacks, *given[1:])
    yield "bfloat16, lists", microseconds(call, 10)
    if len(given[0]) >= 512:
        call = partial(grouped_gemm_torch.expert_mlps, given[0], *stacks, *given[1:])
        yield "bfloat16, grouped GEMM", microseconds(call, 10)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tiles", action="store_true", help="try every tile")
    parser.add_argument("--seconds", type=float, default=90.0)
    options = parser.parse_args()
    end = time.monotonic() + options.seconds
    routing = Routing("softmax", TOP_K, GroupLimit(1, 1), 1.0, num_shared=NUM_SHARED)
    choose, rows = fp8_grouped_gemm_triton.tile_for, list[dict[str, object]]()
    experts = {kind: experts_of(kind) for kind in KINDS}
    stacks = experts["outputs"].gate_up_EJH.stored_OI, experts["outputs"].down_EHI.stored_OI
    wide = stacks[0].bfloat16() * 1e-4, stacks[1].bfloat16() * 1e-4
    for num_tokens in TOKENS:
        x = torch.randn(num_tokens, HIDDEN, dtype=torch.bfloat16, device="cuda")
        given = (x, *route(torch.randn(num_tokens, NUM_EXPERTS, device="cuda"), None, routing))
        pairs = given[2].numel() / (NUM_EXPERTS + NUM_SHARED)
        figures = dict(of_bfloat16(given, wide))
        for kind, stack in experts.items():
            few = (BEFORE,) if pairs <= MOST_FEW else ()
            tiles = TILES if options.tiles else (*few, choose(pairs, is_grouped=kind == "blocks"))
            figures |= {f"{kind}, {name}": us for name, us in tile_times(stack, given, tiles)}
            if pairs <= MOST_FEW:
                times = gated_times(stack, given, tries_all=options.tiles)
                figures |= {f"{kind}, {name}": us for name, us in times}
        case = f"V2-Lite experts, {num_tokens} tokens"
        rows += [{"case": case, "metric": name, "unit": "us", "value": round(us, 2)} for name, us in figures.items()]
        for name, us in sorted(figures.items(), key=lambda figure: figure[1]):
            print(num_tokens, name, round(us, 1), flush=True)
        if time.monotonic() > end:
            break
    write_result(options.out, "mla/fp8_experts.py", rows)


if __name__ == "__main__":
    main()
