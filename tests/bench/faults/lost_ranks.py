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
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
from plait.bench.percentiles import percentile
from plait.bench.result_file import commit, machine, versions
from plait.model_files import find_model
from plait_testing.metrics import read_metrics, sum_over_replicas
from plait_testing.running_server import Server, start_server
from plait_testing.slow_steps import SlowSteps

RECALL = Path(__file__).resolve().parents[2] / "models" / "recall-gqa"
FLAGS = ("--threads", "1", "--max-model-len", "1024", "--dtype", "float32", "--restart", "group")
LAYOUTS: dict[str, tuple[Path | None, tuple[str, ...]]] = {
    "SmolLM2": (None, ()),
    "recall-gqa": (RECALL, ()),
    "recall-gqa --tp 2": (RECALL, ("--tp", "2")),
    "recall-gqa --dp 2": (RECALL, ("--dp", "2")),
}
STRIKES = {"kill -9": signal.SIGKILL, "SIGSTOP": signal.SIGSTOP}
NUM_STREAMS = 4
NUM_TOKENS = 48
POLL_SECONDS = 0.005
GOAL_SECONDS = 4.0


class Stream(threading.Thread):
    """One answer, with the time of each token."""

    def __init__(self, url: str, number: int) -> None:
        super().__init__()
        sampling = {"temperature": 0} if number % 2 == 0 else {"temperature": 1.0, "seed": number}
        self._url = f"{url}/v1/completions"
        self._body = {"prompt": f"count {number} 9", "max_tokens": NUM_TOKENS, "ignore_eos": True, "stream": True}
        self._body |= sampling | {"logprobs": 0}
        self.tokens: list[str] = []
        self.times: list[float] = []
        self.has_begun = threading.Event()
        self.start()

    def run(self) -> None:
        with httpx.stream("POST", self._url, json=self._body, timeout=300) as got:
            for line in got.iter_lines():
                if line.startswith("data: {"):
                    self._take(json.loads(line.removeprefix("data: ")))

    def _take(self, event: dict[str, Any]) -> None:
        for choice in event.get("choices", []):
            if choice["logprobs"] is not None:
                self.tokens += choice["logprobs"]["tokens"]
                self.times += [time.monotonic()] * len(choice["logprobs"]["tokens"])
                if len(self.tokens) >= 3:
                    self.has_begun.set()


def answers(url: str) -> list[list[str]]:
    """The tokens of all streams without a loss."""
    streams = [Stream(url, number) for number in range(NUM_STREAMS)]
    for one in streams:
        one.join()
    return [one.tokens for one in streams]


def detection(url: str, since: float, losses_before: float) -> float:
    """Seconds until `/ready` answers 503 or a loss is counted."""
    with httpx.Client(timeout=60) as client:
        while client.get(f"{url}/ready").status_code == 200 and num_losses(url) == losses_before:
            time.sleep(POLL_SECONDS)
    return time.monotonic() - since


def num_losses(url: str) -> float:
    """Of all replicas."""
    return sum_over_replicas(read_metrics(url))["plait_rank_losses_total"]


def wait_until_whole(running: Server) -> None:
    """Until every replica has its ranks."""
    running.wait_until_serving()
    while sum_over_replicas(read_metrics(running.url))["plait_replica_down"]:
        time.sleep(POLL_SECONDS)


def run_once(
    running: Server, steps: SlowSteps, number: signal.Signals, right: list[list[str]], num_lost: int
) -> dict[str, float]:
    """A rank is struck, and all `num_lost` of its replica are lost."""
    steps.begin()
    streams = [Stream(running.url, number) for number in range(NUM_STREAMS)]
    for one in streams:
        one.has_begun.wait(60)
    ranks, losses = running.workers(), num_losses(running.url)
    struck = time.monotonic()
    ranks[-1].send_signal(number)
    with ThreadPoolExecutor(1) as pool:
        noticed = pool.submit(detection, running.url, struck, losses)
        steps.end()
        for one in streams:
            one.join()
        detected = noticed.result()
    wait_until_whole(running)
    # The pause is the longest gap that ends after the strike.
    resumed = [max(zip(one.times[1:], one.times, strict=False), key=lambda gap: gap[0] - gap[1])[0] for one in streams]
    wrong = sum(one.tokens != expected for one, expected in zip(streams, right, strict=True))
    return {
        "detection_seconds": detected,
        "recovery_seconds": max(resumed) - struck,
        "wrong_streams": wrong,
        "lost_tokens": sum(max(0, NUM_TOKENS - len(one.tokens)) for one in streams),
        "repeated_tokens": sum(max(0, len(one.tokens) - NUM_TOKENS) for one in streams),
        "orphans": sum(psutil.pid_exists(rank.pid) and rank.is_running() for rank in ranks[-num_lost:]),
    }


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
    row: dict[str, object] = {"layout": layout, "strike": strike, "runs": runs}
    for name in ("detection_seconds", "recovery_seconds"):
        values = sorted(result[name] for result in results)
        row |= {f"{name}_p50": round(percentile(values, 50), 3), f"{name}_p99": round(percentile(values, 99), 3)}
    for name in ("wrong_streams", "lost_tokens", "repeated_tokens", "orphans"):
        row[name] = sum(result[name] for result in results)
    return row


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
    if arguments.out is not None:
        record = {"commit": commit(), "machine": machine(), "versions": versions(), "rows": rows}
        arguments.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
