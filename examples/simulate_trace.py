"""Compare scheduler settings on a recorded trace, offline: `python examples/simulate_trace.py`.

`plait simulate` runs the scheduler of `plait serve` in virtual time. It needs no GPU and no model weights.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

TRACE = Path(__file__).with_name("azure_conv_200.csv")
VARIANTS = {
    "default": [],
    "no mixed steps": ["--no-mixed"],
    "chunks of 512": ["--long-prefill-token-threshold", "512"],
}


def simulate(trace: Path, flags: list[str]) -> dict[str, dict[str, float]]:
    """The summary of one run."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "plait.cli", "simulate", "--trace", str(trace), "--out", folder, *flags]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        summary: dict[str, dict[str, float]] = json.loads((Path(folder) / "summary.json").read_text())
        return summary


def main() -> None:
    """Print a line of latencies for each variant."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, default=TRACE, help="Azure's .csv or Mooncake's .jsonl")
    parser.add_argument("--rate-scale", default="20", help="how many times as fast requests arrive")
    args = parser.parse_args()

    print(f"{'ms':<16}{'TTFT p50':>12}{'TTFT p99':>12}{'ITL p99':>12}{'E2E p50':>12}")
    for name, flags in VARIANTS.items():
        found = simulate(args.trace, ["--rate-scale", args.rate_scale, *flags])
        ttft, itl, e2e = found["ttft_seconds"], found["itl_seconds"], found["e2e_seconds"]
        times = (ttft["p50"], ttft["p99"], itl["p99"], e2e["p50"])
        print(f"{name:<16}" + "".join(f"{seconds * 1000:>12.1f}" for seconds in times))


if __name__ == "__main__":
    main()
