"""The small kernels of a layer of DeepSeek-V2-Lite's experts in a decode step, each by itself.

    python tests/bench/gpu/mla/moe_kernels.py --out FILE

Times are of one of many calls in a row in a CUDA graph, so that launches are hidden as in a step.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from plait_kernels.linear import RowNorm, add_rms_norm_quantise, quantise_rows, router_gemm
from plait_kernels.moe import GroupLimit, Routing, route
from plait_kernels.moe.grouped_gemm_triton import combine, list_pairs
from plait_kernels.norm import add_rms_norm

sys.path.insert(0, str(Path(__file__).parents[3]))

from bench.gpu.mla.decode_layers import microseconds
from bench.gpu.written_result import write_result

NUM_EXPERTS, NUM_SHARED, TOP_K, HIDDEN = 64, 2, 6, 2048
ROWS, CALLS = (4, 16, 32, 64), 50
ROUTING = Routing("softmax", TOP_K, GroupLimit(1, 1), 1.0, num_shared=NUM_SHARED)


def normal(*size: int) -> torch.Tensor:
    return torch.randn(size, dtype=torch.bfloat16, device="cuda")


def kernels(num_rows: int) -> Iterator[tuple[str, Callable[[], object]]]:
    """By name."""
    x, residual, out, norm = *(normal(num_rows, HIDDEN) for _ in range(3)), normal(HIDDEN)
    gate, logits = normal(NUM_EXPERTS, HIDDEN), torch.randn(num_rows, NUM_EXPERTS, device="cuda")
    weights, experts = route(logits, None, ROUTING)
    parts = normal(experts.numel(), HIDDEN)
    yield "add_rms_norm", partial(add_rms_norm, x, residual, norm, 1e-6)
    row_norm = RowNorm(residual, norm, 1e-6)
    yield "add_rms_norm_quantise", partial(add_rms_norm_quantise, x, row_norm, is_grouped=False)
    yield "router, cuBLAS", partial(torch.mm, x, gate.T, out_dtype=torch.float32)
    yield "router, ours", partial(router_gemm, x, gate)
    yield "route", partial(route, logits, None, ROUTING)
    yield "list_pairs", partial(list_pairs, experts, NUM_EXPERTS + NUM_SHARED)
    yield "quantise_rows", partial(quantise_rows, x, is_grouped=False)
    yield "combine", partial(combine, parts, weights, out)


def repeated(work: Callable[[], object]) -> None:
    for _ in range(CALLS):
        work()


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    rows = list[dict[str, object]]()
    for num_rows in ROWS:
        for name, work in kernels(num_rows):
            value = round(microseconds(partial(repeated, work)) / CALLS, 2)
            rows.append({"case": f"V2-Lite, {num_rows} rows", "metric": name, "unit": "us", "value": value})
            print(num_rows, name, value, flush=True)
    write_result(options.out, "mla/moe_kernels.py", rows)


if __name__ == "__main__":
    main()
