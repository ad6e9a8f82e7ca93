"""Benchmark two OpenAI-compatible servers side by side: `python examples/compare_servers.py URL OTHER_URL`.

`plait bench serve --against` sends both the same requests in turns, for several seeds. Both serve the same model.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

METRICS = ("output_tokens_per_second", "ttft_p50", "itl_p50", "e2e_p50")


def main() -> None:
    """Print the other server's figures over the first one's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="the first server, say http://127.0.0.1:8000")
    parser.add_argument("other_url", help="the server to compare with it")
    parser.add_argument("flags", nargs=argparse.REMAINDER, help="further flags of `plait bench serve`")
    args = parser.parse_args()

    load = ["--input-len", "128", "--output-len", "64", "--num-prompts", "32", "--concurrency", "8"]
    servers = ["--url", args.url, "--against", args.other_url]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "plait.cli", "bench", "serve", *servers, *load, *args.flags]
        subprocess.run([*command, "--out", folder, "--no-plots"], check=True)
        (path,) = Path(folder).glob("*.json")
        rows = json.loads(path.read_text())["rows"]
    ratios = {row["metric"]: row["value"] for row in rows if row["unit"] == "ratio"}
    print(f"\n{args.other_url} over {args.url}, median of the seeds:")
    for metric in METRICS:
        print(f"  {metric:<26}{ratios[f'ratio_{metric}_median']:.3f}")


if __name__ == "__main__":
    main()
