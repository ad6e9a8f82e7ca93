"""A rank's experts divided by width, and whole ones by number: us of a layer in DeepSeek-V2-Lite's shape, one GPU.

    python tests/bench/gpu/expert_shards.py --ranks 2 --out FILE

By width a rank has every expert's share of the width, by number whole experts. Tokens choose at random: by number a
step of few tokens waits for the rank that has most of their experts. The shared expert is divided by width in both.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from plait.bench.result_file import commit, machine, versions
from plait_kernels.moe import expert_mlps
from torch import Tensor

NUM_EXPERTS, WIDTH, HIDDEN, CHOSEN, SHARED = 64, 1408, 2048, 6, 2
TOKENS = (1, 4, 16, 64, 256, 1024, 2048, 8192)
MOST_CAPTURED = 2048
LAYERS = 6
"""Weights of so many layers in turns, more than the caches hold."""
GPU = torch.device("cuda", 0)


class Rank:
    """Experts of one rank."""

    def __init__(self, num_experts: int, width: int) -> None:
        self.num_experts = num_experts
        shapes = (num_experts, 2 * width, HIDDEN), (num_experts, HIDDEN, width)
        self.layers = [
            [torch.randn(*shape, device=GPU, dtype=torch.bfloat16) / 50 for shape in shapes] for _ in range(LAYERS)
        ]

    def time_us(self, x_TH: Tensor, experts_TK: Tensor) -> float:
        weights_TK = torch.rand(experts_TK.shape, device=GPU)

        def run() -> None:
            for gate_up, down in self.layers:
                expert_mlps(x_TH, gate_up, down, weights_TK, experts_TK)

        run()
        again, times = self._captured(run) if len(x_TH) <= MOST_CAPTURED else run, []
        for _ in range(9):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            again()
            begin.record()
            again()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1000 / LAYERS)
        return statistics.median(times)

    @staticmethod
    def _captured(run: Callable[[], None]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        return graph.replay


def choose(num_tokens: int, num_experts: int, num_chosen: int) -> Tensor:
    """Different experts for each token."""
    return torch.rand(num_tokens, num_experts, device=GPU).topk(num_chosen, dim=1).indices


def most_on_one_rank(num_ranks: int) -> int:
    """Of a token's experts, those on the rank that has most; the mean over many tokens, rounded."""
    owner = choose(10_000, NUM_EXPERTS, CHOSEN) % num_ranks
    counts = torch.stack([(owner == rank).sum(dim=1) for rank in range(num_ranks)], dim=1)
    return round(float(counts.amax(dim=1).float().mean()))


def measure(num_ranks: int) -> list[dict[str, object]]:
    by_width = Rank(NUM_EXPERTS + SHARED, WIDTH // num_ranks)
    by_number = Rank((NUM_EXPERTS + SHARED) // num_ranks, WIDTH)
    rows: list[dict[str, object]] = []
    for num_tokens in TOKENS:
        x_TH = torch.randn(num_tokens, HIDDEN, device=GPU, dtype=torch.bfloat16)
        shared = torch.arange(NUM_EXPERTS, NUM_EXPERTS + SHARED, device=GPU).expand(num_tokens, -1)
        chosen = torch.cat([choose(num_tokens, NUM_EXPERTS, CHOSEN), shared], dim=1)
        own, num_own = NUM_EXPERTS // num_ranks, most_on_one_rank(num_ranks) if num_tokens <= 4 else CHOSEN // num_ranks
        rest = torch.arange(own, own + SHARED // num_ranks, device=GPU).expand(num_tokens, -1)
        whole = torch.cat([choose(num_tokens, own, num_own), rest], dim=1)
        case = f"{num_tokens} tokens, {num_ranks} ranks"
        for name, rank, experts in (("by width", by_width, chosen), ("by number", by_number, whole)):
            us = rank.time_us(x_TH, experts)
            read = len(experts.unique()) * 3 * HIDDEN * (WIDTH // num_ranks if rank is by_width else WIDTH) * 2
            rows.append({"case": case, "metric": name, "unit": "us", "value": round(us, 1), "goal": None})
            rows.append(
                {
                    "case": case,
                    "metric": f"{name}, weights read",
                    "unit": "TB/s",
                    "value": round(read / us / 1e6, 2),
                    "goal": None,
                }
            )
            print(rows[-2], rows[-1]["value"], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    rows = measure(options.ranks)
    result = {
        "commit": commit(),
        "command": f"tests/bench/gpu/expert_shards.py --ranks {options.ranks} --out gpu-expert-shards.json",
        "machine": {"gpu": torch.cuda.get_device_name()} | machine(),
        "versions": versions(("plait", "torch", "triton")),
        "rows": rows,
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
