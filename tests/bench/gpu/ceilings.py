"""What this machine's GPU sustains: the rate of a large bfloat16 GEMM and of a copy. All goals scale with them.

python tests/bench/gpu/ceilings.py --out FILE
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch

M, N, K = 8192, 24_576, 4096
GEMM_SECONDS, COPY_SECONDS = 10.0, 2.0
COPY_BYTES = 4 << 30


def mean_seconds(work: Callable[[], object], seconds: float) -> float:
    """Of one call, called again and again for so long."""
    work()
    torch.cuda.synchronize()
    began, num_calls = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        for _ in range(10):
            work()
        torch.cuda.synchronize()
        num_calls += 10
    return (time.perf_counter() - began) / num_calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    a = torch.randn(M, K, dtype=torch.bfloat16, device="cuda")
    b = torch.randn(N, K, dtype=torch.bfloat16, device="cuda")
    source = torch.empty(COPY_BYTES // 4, dtype=torch.int32, device="cuda").random_()
    target = torch.empty_like(source)
    gemm = 2 * M * N * K / mean_seconds(lambda: a @ b.T, GEMM_SECONDS) / 1e12
    copy = 2 * COPY_BYTES / mean_seconds(lambda: target.copy_(source), COPY_SECONDS) / 1e12
    rows = [
        {"case": f"bf16 {M}x{N}x{K}", "metric": "rate", "unit": "TFLOP/s", "value": round(gemm, 1)},
        {"case": f"copy of {COPY_BYTES >> 30} GiB", "metric": "rate", "unit": "TB/s", "value": round(copy, 3)},
    ]
    print(rows, flush=True)
    if options.out:
        options.out.write_text(json.dumps({"command": "tests/bench/gpu/ceilings.py", "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
