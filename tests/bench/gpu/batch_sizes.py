"""Default batch sizes beside hand-set ones: five closed loads of a shape through the front door.

    python tests/bench/gpu/batch_sizes.py --shape qwen3-8b --out FILE

Each arm is a server of its own with random weights: one without `--max-seqs` and `--max-batch-tokens`, one with
`serve_load.LOADED_FLAGS`. The goal of a default's rate is 97% of the hand-set one's. Streams are not scored again.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from plait.bench.result_file import commit, machine, versions

sys.path.append(str(Path(__file__).parents[2]))
from bench.gpu.load_cases import LOADED, RATE
from bench.gpu.model_shapes import SHAPES, write_shape
from bench.gpu.roofline import model_cost
from bench.gpu.serve_load import LIBRARIES, LOADED_FLAGS, METRICS, Bench, Ran

LOADS = ("128/128 @ 1", "128/128 @ 64", "128/128 @ 256", "1024/128 @ 256", "8192/256 @ 32", "16/8 @ 2")
"""Names of loads; the last one is the dry run's."""
ARMS = {"hand-set": LOADED_FLAGS, "default": ()}
SHARE = 0.97


def rows(arm: str, runs: list[Ran], by_hand: dict[str, float]) -> Iterator[dict[str, object]]:
    """The figures of one arm; `by_hand` has the hand-set rates by the load's name."""
    for ran in runs:
        for metric, value in ran.figures.items():
            rate = by_hand.get(ran.case.name) if metric == RATE and arm == "default" else None
            goal = None if rate is None else round(SHARE * rate, 2)
            case = f"{ran.case.name}, {arm}"
            yield {"case": case, "metric": metric, "unit": METRICS[metric], "value": round(value, 5), "goal": goal}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=LOADED, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    loaded = LOADED[options.shape]
    cases = [case for case in loaded.cases if case.name in LOADS]
    made: list[dict[str, object]] = []
    by_hand: dict[str, float] = {}
    with TemporaryDirectory() as kept:
        model = Path(kept) / loaded.shape
        write_shape(loaded.shape, model)
        for arm, flags in ARMS.items():
            logs = Path(kept) / arm
            logs.mkdir()
            bench = Bench(model, model_cost(SHAPES[loaded.shape]), None, logs, (), flags)
            for ran in bench.run_all(cases):
                print(arm, ran.case.name, ran.figures, *ran.reasons, flush=True)
            if arm == "hand-set":
                by_hand = {ran.case.name: ran.figures[RATE] for ran in bench.runs if RATE in ran.figures}
            made += rows(arm, bench.runs, by_hand)
            made += [row for start in bench.starts for row in start.rows()]
            print(arm, *(line for start in bench.starts for line in start.log.splitlines() if "CUDA graphs" in line))
    device = {"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}
    result = {
        "commit": commit(),
        "command": " ".join(["tests/bench/gpu/batch_sizes.py", *sys.argv[1:]]),
        "machine": device | machine(),
        "versions": versions(LIBRARIES),
        "rows": made,
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
