"""What a killed rank costs 64 greedy streams of a model on a GPU, with `--restart group`: one JSON.

    python tests/bench/gpu/lost_rank.py --shape qwen3-8b --out FILE [--checkpoint FOLDER] [-- FLAGS OF PLAIT SERVE]

Serves a seeded checkpoint that lies in memory. The same streams run twice without a loss: how far these two agree is
what batches of other sizes do to bfloat16. Then the rank is killed (kill -9) in the middle of them, `--strikes` times;
kernels are compiled by then. Seconds count from the strike. Streams that differ from the first ones are scored again by
a plain server (`rescoring`), before and after the pause alike. `--shape tiny` is a dry run on a CPU.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import torch
from plait.bench.result_file import commit, machine, versions

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.faults.observe import is_there, leaked_pages, orphans, reaches, wait_until_whole
from bench.faults.streams import Stream, losses, tokens
from bench.gpu import rescoring
from bench.gpu.model_shapes import SHAPES, write_shape
from bench.gpu.seeded_checkpoint import write_checkpoint
from plait_testing.running_server import Server, start_server

NUM_STREAMS = 64
PROMPT_TOKENS, ANSWER_TOKENS = 128, 256
NUM_EARLY = 32
"""Tokens that each stream has when the rank is killed."""
FIRST_WORD = 300
"""Ids from here on are words."""
GOAL_SECONDS = 20.0
MOST_LEFT_MB = 1024
"""Of GPU memory beyond what was used before the server: a context takes some hundred MB, the weights 16 GB."""
NUM_SCORED = 16
WAIT_SECONDS = 120.0
FLAGS = ("--no-prefix-cache", "--max-seqs", f"{NUM_STREAMS}")
RESTART = ("--restart", "group", "--restart-budget", "1000")
LIBRARIES = ("plait", "torch", "triton", "flashinfer-python")


class IdStream(Stream):
    """A greedy stream that takes the tokens' ids."""

    def __init__(self, url: str, number: int, vocab_size: int) -> None:
        draw = random.Random(number)
        self.prompt = [draw.randrange(FIRST_WORD, vocab_size) for _ in range(PROMPT_TOKENS)]
        fields = {"logprobs": None, "return_token_ids": True, "temperature": 0, "max_tokens": ANSWER_TOKENS}
        super().__init__(url, number, prompt=self.prompt, **fields)

    def _take(self, event: dict[str, Any]) -> None:
        for choice in event.get("choices", []):
            ids = choice.get("token_ids") or []
            self.tokens += map(str, ids)
            self.times += [time.monotonic()] * len(ids)


class GpuMemory(threading.Thread):
    """Looks how much memory of all GPUs is used until it is told to end."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._over = threading.Event()
        self.seen: list[tuple[float, int]] = []
        """When, and how many MB."""
        self.start()

    def run(self) -> None:
        while not self._over.wait(0.1):
            self.seen.append((time.monotonic(), used_mb()))

    def end(self) -> None:
        self._over.set()
        self.join()


def used_mb() -> int:
    return sum(map(int, nvidia_smi("--query-gpu=memory.used")))


def processes_on_gpu() -> list[int]:
    """As far as this container sees their numbers."""
    return list(map(int, nvidia_smi("--query-compute-apps=pid")))


def nvidia_smi(query: str) -> list[str]:
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    return subprocess.check_output(command, text=True).split()


@dataclass
class Bench:
    """A server, its first answers, and the rows so far."""

    running: Server
    vocab_size: int
    used_before: int
    """MB of GPU memory without the server."""
    right: list[list[str]] = field(default_factory=list)
    rows: list[dict[str, object]] = field(default_factory=list)
    differing: list[IdStream] = field(default_factory=list)

    def ask(self) -> list[IdStream]:
        return [IdStream(self.running.url, number, self.vocab_size) for number in range(NUM_STREAMS)]

    def add(self, case: str, **values: float | None) -> None:
        """Rows of figures with a unit behind their name, and the goals of some."""
        goals = {"all_go_on_seconds": GOAL_SECONDS, "complete_streams": NUM_STREAMS, "orphans": 0, "gpu_mb_left": 0}
        for metric, value in values.items():
            if value is not None:
                unit = "seconds" if metric.endswith("_seconds") else "MB" if "_mb" in metric else "count"
                row = {"case": case, "metric": metric, "unit": unit, "value": round(value, 3)}
                self.rows.append(row | {"goal": goals.get(metric)})
        print(case, {name: value for name, value in values.items() if value is not None}, flush=True)

    def run_undisturbed(self) -> None:
        self.right = tokens(self.ask())
        again = self.ask()
        self.add("undisturbed, twice", **self.compare(again, tokens(again)))

    def compare(self, streams: Sequence[IdStream], given: Sequence[Sequence[str]]) -> dict[str, float | None]:
        """How far streams agree with the first ones."""
        places = [first_difference(one, right) for one, right in zip(given, self.right, strict=True)]
        found = [(stream, place) for stream, place in zip(streams, places, strict=True) if place is not None]
        self.differing += [stream for stream, _ in found]
        return {
            "equal_streams": len(streams) - len(found),
            "first_difference_tokens": min((place for _, place in found), default=None),
        }

    def strike(self, number: int) -> None:
        """Kill the rank while all streams are under way."""
        rank, streams = self.rank(), self.ask()
        reaches(lambda: all(len(one.tokens) >= NUM_EARLY for one in streams), WAIT_SECONDS)
        gpu = GpuMemory() if torch.cuda.is_available() else None
        used, struck = used_mb() if gpu else 0, time.monotonic()
        rank.kill()
        reaches(lambda: not is_there(rank), WAIT_SECONDS)
        gone, given = time.monotonic(), tokens(streams)
        wait_until_whole(self.running)
        paused = [one for one in streams if len(one.times) > 1]
        self.add(
            f"strike {number}",
            process_gone_seconds=gone - struck,
            first_goes_on_seconds=min(one.resumed_at() for one in paused) - struck,
            all_go_on_seconds=max(one.resumed_at() for one in paused) - struck,
            all_complete_seconds=max(one.ended_at for one in streams) - struck,
            complete_streams=sum(len(one.tokens) == ANSWER_TOKENS for one in streams),
            differences_before_pause=self.num_before_pause(streams),
            **self.compare(streams, given),
            lost_tokens=losses(given, self.right)["lost_tokens"],
            repeated_tokens=losses(given, self.right)["repeated_tokens"],
            leaked_pages=leaked_pages(self.running.url),
            orphans=orphans([rank]),
            **(self.memory(gpu, rank, struck, used) if gpu else {}),
        )

    def num_before_pause(self, streams: Sequence[IdStream]) -> int:
        """Streams that differed when they paused, which the pause did not do."""
        pairs = zip(streams, self.right, strict=True)
        return sum(one.tokens[: (num := one.num_before_pause())] != right[:num] for one, right in pairs)

    def memory(self, gpu: GpuMemory, rank: psutil.Process, struck: float, used: int) -> dict[str, float | None]:
        """When the killed rank's memory was free, before the new one took its own."""
        gpu.end()
        least = min(mb for at, mb in gpu.seen if at > struck)
        free = [at for at, mb in gpu.seen if at > struck and mb <= self.used_before + MOST_LEFT_MB]
        return {
            "gpu_free_seconds": min(free) - struck if free else None,
            "gpu_mb_least": least - self.used_before,
            "gpu_mb_left": 0 if free else least - self.used_before,
            "gpu_mb_more_than_before": used_mb() - used,
            "is_old_rank_on_gpu": rank.pid in processes_on_gpu(),
        }

    def rank(self) -> psutil.Process:
        """The process of the only rank."""
        return next(process for process in self.running.workers() if is_rank(process))


def is_rank(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return "plait_worker" in process.cmdline()
    return False


def first_difference(given: Sequence[str], right: Sequence[str]) -> int | None:
    """The first place at which they differ; None for equal ones."""
    pairs = enumerate(zip(given, right, strict=False))
    shorter = min(len(given), len(right))
    return next((place for place, (one, other) in pairs if one != other), shorter if len(given) != len(right) else None)


@contextmanager
def serving(log: Path, model: Path, *flags: str) -> Iterator[Server]:
    running = start_server(log, model, *flags)
    try:
        if not running.url:
            raise SystemExit(f"no server: {running.last_line}")
        yield running
    finally:
        running.stop()


def score(bench: Bench, log: Path, model: Path) -> None:
    """Whether what differs is as good an answer."""
    chosen = bench.differing[-NUM_SCORED:]
    if not chosen:
        return
    limits = ("--max-seqs", f"{rescoring.MAX_SEQS}", "--max-batch-tokens", f"{rescoring.MAX_BATCH_TOKENS}")
    streams = [
        rescoring.Stream(index=index, prompt=one.prompt, answer=list(map(int, one.tokens)))
        for index, one in enumerate(chosen)
    ]
    with serving(log, model, *limits, *rescoring.SERVE_FLAGS) as plain:
        gaps = rescoring.rescore(plain.url, model.name, streams)
    bench.add("streams that differ, scored again", streams=gaps.num_streams, gap_median=gaps.median)
    bench.add("streams that differ, scored again", gap_max=max(gaps.values), is_right=gaps.is_right)


def write(bench: Bench, out: Path) -> None:
    device = {"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}
    record = {
        "commit": commit(),
        "command": " ".join(["tests/bench/gpu/lost_rank.py", *sys.argv[1:]]),
        "machine": device | machine(),
        "versions": versions(LIBRARIES),
        "rows": bench.rows,
    }
    out.write_text(json.dumps(record, indent=1) + "\n")


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--strikes", type=int, default=3)
    parser.add_argument("--checkpoint", type=Path, help="folder in memory; a checkpoint that lies there is taken")
    parser.add_argument("--no-rescoring", action="store_true", help="for want of time: it needs a server of its own")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("serve_flags", nargs="*", help="further flags of plait serve, behind --")
    return parser.parse_args()


def main() -> None:
    options = parsed()
    began = time.monotonic()
    with TemporaryDirectory(dir="/dev/shm") as kept:
        model = (options.checkpoint or Path(kept)) / options.shape
        write_shape(options.shape, model)
        if not any(model.glob("*.index.json")):
            write_checkpoint(model)
        print(f"the checkpoint lies in memory after {time.monotonic() - began:.0f} s", flush=True)
        used_before = used_mb() if torch.cuda.is_available() else 0
        began = time.monotonic()
        with serving(Path(kept) / "log", model, *FLAGS, *RESTART, *options.serve_flags) as running:
            bench = Bench(running, int(str(SHAPES[options.shape]["vocab_size"])), used_before)
            bench.add("start", ready_seconds=time.monotonic() - began)
            bench.run_undisturbed()
            for number in range(1, options.strikes + 1):
                reaches(lambda: bool(running.spares()), WAIT_SECONDS)
                bench.strike(number)
                write(bench, options.out)
        if not options.no_rescoring:
            score(bench, Path(kept) / "plain.log", model)
        write(bench, options.out)


if __name__ == "__main__":
    main()
