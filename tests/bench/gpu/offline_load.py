"""What the HTTP door costs: one load through `plait serve` and through `plait.LLM`, by turns on the same GPU.

    python tests/bench/gpu/offline_load.py --shape qwen3-8b --out FILE [-- FLAGS OF PLAIT SERVE]

128/128 tokens, greedy, end tokens ignored, without a prefix cache: 256 streams at a time over HTTP, and the same number
of requests given to `plait.LLM` at once, of which 256 run at a time. Both stand ready all the while, each with half of
the GPU's memory. A figure is the median of `--rounds`. `--shape tiny` is a dry run on a CPU.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import plait
import torch
from plait.bench.result_file import commit, machine, versions

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.gpu.fields_load import SIZES, Loads
from bench.gpu.model_shapes import SHAPES, write_shape
from plait_testing.running_server import start_server

GOAL = 0.98
"""Of the rate without HTTP."""
GPU_SHARE = 0.42
"""Of the memory, for each of the two."""


def offline_rate(llm: plait.LLM, shape: str, seed: int) -> float:
    """Output tokens a second of a load without HTTP."""
    _, num_prompts, length = SIZES[shape]
    drawn, num_tokens = random.Random(seed), int(str(SHAPES[shape]["vocab_size"]))
    prompts = [[drawn.randrange(num_tokens) for _ in range(length)] for _ in range(num_prompts)]
    asked = plait.SamplingParams(max_tokens=length, temperature=0.0, ignore_eos=True)
    began = time.perf_counter()
    answers = llm.generate(prompts, asked, use_tqdm=False)
    seconds = time.perf_counter() - began
    lengths = [len(answer.outputs[0].token_ids) for answer in answers]
    assert lengths == [length] * num_prompts, sorted(set(lengths))
    return sum(lengths) / seconds


def served_rate(loads: Loads) -> float:
    """The same through HTTP."""
    figures = loads.run(lambda _index: {})
    assert figures.num_failed == figures.num_short == 0, figures
    return figures.rate


def rows(served: list[float], offline: list[float]) -> list[dict[str, object]]:
    ratios = [http / without for http, without in zip(served, offline, strict=True)]
    rate = {"metric": "output_tokens_per_second", "unit": "tokens/s", "goal": None}
    return [
        {"case": "plait serve"} | rate | {"value": round(statistics.median(served), 1), "of_each_round": served},
        {"case": "plait.LLM"} | rate | {"value": round(statistics.median(offline), 1), "of_each_round": offline},
        {"case": "plait serve over plait.LLM", "metric": "output_tokens_per_second", "unit": "share", "goal": GOAL}
        | {"value": round(statistics.median(ratios), 4)},
    ]


def measure(model: Path, shape: str, rounds: int, serve_flags: list[str], log: Path) -> tuple[list[float], list[float]]:
    """Rates of the rounds behind a first one, which compiles."""
    settings = {"max_seqs": SIZES[shape][0], "max_batch_tokens": 8192, "prefix_cache": False, "load_format": "dummy"}
    flags = ["--max-seqs", str(SIZES[shape][0]), "--max-batch-tokens", "8192", "--no-prefix-cache"]
    flags += ["--load-format", "dummy"]
    if shape != "tiny":
        settings |= {"gpu_memory_utilization": GPU_SHARE}
        flags += ["--gpu-memory-utilization", str(GPU_SHARE)]
    served, offline = [], []
    server = start_server(log, model, *flags, *serve_flags)
    if not server.url:
        raise SystemExit(f"no server: {server.errors[-3000:]}")
    try:
        with plait.LLM(model, **settings) as llm:
            loads = Loads(server, shape)
            for round_ in range(rounds + 1):
                served.append(served_rate(loads))
                offline.append(offline_rate(llm, shape, round_))
                print(f"round {round_}: {served[-1]:.0f} and {offline[-1]:.0f} tokens/s", flush=True)
    finally:
        server.stop()
    return served[1:], offline[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SIZES, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("serve_flags", nargs="*", help="further flags of plait serve, behind --")
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        model = Path(folder) / options.shape
        write_shape(options.shape, model)
        served, offline = measure(model, options.shape, options.rounds, options.serve_flags, Path(folder) / "serve.log")
    result = {
        "commit": commit(),
        "command": " ".join(["tests/bench/gpu/offline_load.py", *sys.argv[1:]]),
        "machine": ({"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}) | machine(),
        "versions": versions(("plait", "torch")),
        "rows": rows(served, offline),
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
