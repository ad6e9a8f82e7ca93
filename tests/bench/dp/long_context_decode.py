"""A decode step of many rows far into their contexts, V2-Lite on two GPUs: `--tp 2` against `--dp 2 --dp-attention`.

    python tests/bench/dp/long_context_decode.py --out FILE

Through HTTP: 512 prompts of 4,700 tokens and no prefix cache. When all of them decode, the server's own counters are
read twice, some seconds apart. Seconds of a step are wall time over the steps that one replica took.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import msgspec
import torch
from plait.bench.result_file import Row, commit, machine, versions

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.gpu.model_shapes import write_shape
from plait_testing.metrics import read_metrics, sum_over_replicas
from plait_testing.running_server import Server, start_server

LAYOUTS = {"--tp 2": 1, "--dp 2 --dp-attention": 2}
"""Flags, and the replicas that share the rows."""
PROMPT_TOKENS, ANSWER_TOKENS = 4_700, 3_000
VOCABULARY = 100_000
STEP_GOAL_SECONDS = 0.017
SHARE_GOAL = 0.65
PATIENCE_SECONDS = 240.0
LIBRARIES = ("plait", "torch", "triton", "flashinfer-python")


@dataclass(frozen=True, slots=True)
class Counted:
    """A server's counters at one moment."""

    at: float
    steps: float
    decode_steps: float
    answer_tokens: float
    running: float
    """Requests."""

    @classmethod
    def of(cls, server: Server) -> Counted:
        samples = sum_over_replicas(read_metrics(server.url))
        steps = {kind: samples[f'plait_steps_total{{kind="{kind}"}}'] for kind in ("decode", "mixed", "prefill")}
        answer_tokens, running = samples["plait_generated_tokens_total"], samples["plait_requests_running"]
        return cls(time.monotonic(), sum(steps.values()), steps["decode"], answer_tokens, running)


def fill(server: Server, num_rows: int) -> None:
    """Send the prompts, of random words, from threads that end with the server."""

    def ask(seed: int) -> None:
        draw = random.Random(seed)
        prompt = [draw.randrange(2, VOCABULARY) for _ in range(PROMPT_TOKENS)]
        body = {"prompt": prompt, "max_tokens": ANSWER_TOKENS, "ignore_eos": True, "temperature": 0}
        with suppress(httpx.HTTPError):
            httpx.post(f"{server.url}/v1/completions", json=body, timeout=600)

    for seed in range(num_rows):
        threading.Thread(target=ask, args=(seed,), daemon=True).start()


def wait_until_all_decode(server: Server, num_rows: int) -> None:
    """Until a second passes in which every row got a token in each step, and no step had a prompt."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        before = Counted.of(server)
        time.sleep(1)
        now = Counted.of(server)
        steps = now.steps - before.steps
        if now.running == num_rows and 0 < steps == now.decode_steps - before.decode_steps:
            return
    raise SystemExit(f"{num_rows} rows do not decode together: {server.errors[-2000:]}")


def measure(folder: Path, layout: str, options: argparse.Namespace) -> tuple[float, float]:
    """Seconds of a step, and the mean context."""
    replicas = LAYOUTS[layout]
    rows = options.rows // replicas
    limits = ["--max-seqs", str(rows), "--max-batch-tokens", "8192", "--no-prefix-cache", "--load-format", "dummy"]
    server = start_server(folder / f"{replicas}.log", folder, *limits, *layout.split(), *options.serve_flags)
    try:
        if not server.url:
            raise SystemExit(f"no server: {server.errors[-4000:]}")
        fill(server, options.rows)
        wait_until_all_decode(server, options.rows)
        before = Counted.of(server)
        time.sleep(options.seconds)
        after = Counted.of(server)
    finally:
        os.killpg(server.process.pid, signal.SIGKILL)  # a drain would wait for the answers
        server.process.wait()
    steps = (after.steps - before.steps) / replicas
    context = PROMPT_TOKENS + (before.answer_tokens + after.answer_tokens) / 2 / options.rows
    return (after.at - before.at) / steps, context


def rows_of(layout: str, num_rows: int, seconds: float, context: float) -> list[Row]:
    case = f"{num_rows} rows, {layout}"
    goal = STEP_GOAL_SECONDS if LAYOUTS[layout] > 1 else None
    return [Row(case, "decode_step", "seconds", seconds, goal), Row(case, "mean_context", "tokens", context, None)]


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="deepseek-v2-lite")
    parser.add_argument("--rows", type=int, default=512, help="of all replicas together")
    parser.add_argument("--seconds", type=float, default=6)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("serve_flags", nargs="*", help="further flags of plait serve, behind --")
    options = parser.parse_args(words)
    found: dict[str, float] = {}
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as kept:
        write_shape(options.shape, Path(kept))
        for layout in LAYOUTS:
            found[layout], context = measure(Path(kept), layout, options)
            rows += rows_of(layout, options.rows, found[layout], context)
            print(*rows[-2:], flush=True)
    tp, dp = found.values()
    rows.append(Row(f"{options.rows} rows", "dp_attention_over_tp", "1", dp / tp, SHARE_GOAL))
    device = {"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}
    result = {
        "commit": commit(),
        "command": " ".join(["tests/bench/dp/long_context_decode.py", *sys.argv[1:]]),
        "machine": device | machine(),
        "versions": versions(LIBRARIES),
        "rows": rows,
    }
    options.out.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")


if __name__ == "__main__":
    main()
