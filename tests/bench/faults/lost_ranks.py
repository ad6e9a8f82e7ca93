"""How long a lost rank is noticed late, and how long its streams pause, with `--restart group` on CPUs.

    PYTHONPATH=tests python tests/bench/faults/lost_ranks.py --runs 20 --out tests/bench/results/lost-ranks.json

One server for each layout, with four greedy and seeded streams under way in float32. A run strikes one rank. Detection
is from the strike to the first 503 of `/ready`, or to the counted loss of a replica beside one that serves; recovery is
to the first token after the pause. Lost and repeated tokens are counted against the same answers without a loss;
orphans are the old ranks' processes that are left.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bench.faults.fault_rows import Result, row, write_record
from bench.faults.lost_rank import lose_rank
from bench.faults.streams import answers, ask
from plait.model_files import find_model
from plait_testing.running_server import Server, start_server
from plait_testing.slow_steps import SlowSteps

RECALL = Path(__file__).resolve().parents[2] / "models" / "recall-gqa"
FLAGS = ("--threads", "1", "--max-model-len", "1024", "--dtype", "float32", "--restart", "group")
LAYOUTS: dict[str, tuple[Path | None, tuple[str, ...]]] = {
    "SmolLM2": (None, ()),
    "recall-gqa": (RECALL, ()),
    "recall-gqa --tp 2": (RECALL, ("--tp", "2")),
    "recall-gqa --dp 2": (RECALL, ("--dp", "2")),
    "recall-gqa --dp 2 --tp 2": (RECALL, ("--dp", "2", "--tp", "2")),
}
STRIKES = {"kill -9": signal.SIGKILL, "SIGSTOP": signal.SIGSTOP}


def run_once(
    running: Server, steps: SlowSteps, number: signal.Signals, right: list[list[str]], num_lost: int
) -> Result:
    """A rank is struck, and all `num_lost` of its replica are lost."""
    steps.begin()
    streams = ask(running.url)
    for one in streams:
        one.has_begun.wait(60)
    return lose_rank(running, streams, right, lambda rank: rank.send_signal(number), steps.end, num_lost)


def measure(layout: str, strike: str, runs: int) -> dict[str, object]:
    model, flags = LAYOUTS[layout]
    with tempfile.TemporaryDirectory() as folder:
        steps = SlowSteps(Path(folder))
        with steps.of_servers():
            running = start_server(
                Path(folder) / "log", model or find_model(None).path, *FLAGS, *flags, "--restart-budget", "1000"
            )
        try:
            right = answers(running.url)
            num_lost = 2 if "--tp" in flags else 1
            results = [run_once(running, steps, STRIKES[strike], right, num_lost) for _ in range(runs)]
        finally:
            running.kill()
    return row(results, layout=layout, strike=strike)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--layout", choices=LAYOUTS, action="append")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args(argv)
    rows = []
    for layout in arguments.layout or LAYOUTS:
        for strike in STRIKES:
            rows.append(measure(layout, strike, arguments.runs))
            print(json.dumps(rows[-1]), flush=True)
    write_record(arguments.out, rows)


if __name__ == "__main__":
    main(sys.argv[1:])
