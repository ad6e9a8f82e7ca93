"""DeepSeek-V2-Lite's experts by each of the ways, from one token to thousands: where one overtakes the other.

python tests/bench/gpu/mla/experts.py [--ranks 4] --out FILE

With `--ranks N` a rank of N has each expert's share of the width.
"""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from pathlib import Path

import torch
from plait_kernels.moe import GroupLimit, Routing, grouped_gemm_torch, grouped_gemm_triton, indexed_gemv_triton, route
from plait_kernels.moe.grouped_gemm_triton import Tile, Tiles

sys.path.insert(0, str(Path(__file__).parents[3]))

from bench.gpu.mla.decode_layers import microseconds

NUM_EXPERTS, NUM_SHARED, TOP_K, HIDDEN, WIDTH = 64, 2, 6, 2048, 1408
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 8192)
TILES = (
    Tile(16, 64, 128, 4, 4),
    Tile(16, 128, 128, 4, 2),
    Tile(16, 128, 128, 4, 3),
    Tile(16, 128, 64, 4, 4),
    Tile(16, 32, 256, 4, 3),
    Tile(32, 64, 128, 4, 2),
    Tile(32, 64, 128, 4, 3),
    Tile(32, 128, 64, 4, 4),
    Tile(64, 64, 64, 4, 3),
    Tile(64, 64, 64, 4, 4),
    Tile(64, 128, 64, 4, 3),
    Tile(64, 128, 64, 8, 4),
    Tile(128, 128, 64, 8, 3),
)
COPY_BYTES_A_US = 4.24e6


def normal(*size: int) -> torch.Tensor:
    return torch.randn(*size, dtype=torch.bfloat16, device="cuda")


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tiles", action="store_true", help="try every tile")
    parser.add_argument("--ranks", type=int, default=1, help="that divide the width")
    options = parser.parse_args()
    num_all, width = NUM_EXPERTS + NUM_SHARED, WIDTH // options.ranks
    gate_up, down = normal(num_all, 2 * width, HIDDEN), normal(num_all, HIDDEN, width)
    routing = Routing("softmax", TOP_K, GroupLimit(1, 1), 1.0, num_shared=NUM_SHARED)
    rows: list[dict[str, object]] = []
    for num_tokens in TOKENS:
        x = normal(num_tokens, HIDDEN) * 0.01
        given = (x, gate_up, down, *route(torch.randn(num_tokens, NUM_EXPERTS, device="cuda"), None, routing))
        figures: dict[str, float] = {}
        if num_tokens <= 64:
            figures["by index"] = microseconds(partial(indexed_gemv_triton.expert_mlps, *given))
        if num_tokens <= 2048:
            figures["listed"] = microseconds(partial(grouped_gemm_triton.expert_mlps, *given))
        if num_tokens >= 64:
            figures["grouped GEMM"] = microseconds(partial(grouped_gemm_torch.expert_mlps, *given), 10)
        if options.tiles and 16 <= num_tokens <= 2048:
            figures |= tiles(given)
        num_used = given[4].unique().numel()
        floor_bytes, operations = num_used * 3 * HIDDEN * width * 2, given[4].numel() * 6 * HIDDEN * width
        figures["floor"] = max(floor_bytes / COPY_BYTES_A_US, operations / 765e6)
        print(num_tokens, {name: round(value, 1) for name, value in figures.items()}, flush=True)
        case = f"V2-Lite experts {width} wide of {num_tokens} tokens"
        rows += [{"case": case, "metric": name, "unit": "us", "value": round(us, 2)} for name, us in figures.items()]
    if options.out:
        command = " ".join(["tests/bench/gpu/mla/experts.py", *sys.argv[1:]])
        options.out.write_text(json.dumps({"command": command, "rows": rows}, indent=1) + "\n")


def tiles(given: tuple[torch.Tensor, ...]) -> dict[str, float]:
    """The grouped GEMM with every tile, first for gate and up, then for down."""
    num_pairs, num_experts = given[4].numel(), given[1].shape[0]
    choose, figures = grouped_gemm_triton.tiles_for, {}
    usual = choose(num_pairs / num_experts, given[2].shape[2])
    for tile in TILES:
        for name, changed in (("gate and up", Tiles(tile, usual.down)), ("down", Tiles(usual.gate_up, tile))):
            grouped_gemm_triton.tiles_for = lambda *_, changed=changed: changed
            figures[f"{name} {tile}"] = microseconds(lambda: grouped_gemm_triton.expert_mlps(*given), 10)
    grouped_gemm_triton.tiles_for = choose
    return figures


if __name__ == "__main__":
    main()
