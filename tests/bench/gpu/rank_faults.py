"""What a lost rank costs: seconds until all processes and their GPU memory are gone, and the named cause.

    python tests/bench/gpu/rank_faults.py --model tests/models/recall-gqa --tp 2 --runs 20 --at-once 10 --out FILE

One rank is lost while it loads, captures or serves eight streams: `kill` is SIGKILL; `stop` SIGSTOP, which the
server sees or a peer that waits; `memory` asks for more GPU memory than there is; `exception` is a bug. Seconds
count from the signal, or from the line by which the rank says what has happened to it. With `--one-gpu` all ranks share
the first GPU (`rank_plugin`). `--at-once N` loses a rank of N servers side by side on the same GPUs; the memory that is
left is looked at when all N are gone.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import httpx
import psutil
from plait.bench.result_file import commit, machine, versions

sys.path.insert(0, str(Path(__file__).parents[2]))

from plait_testing.running_server import READY

STAGES = {"loading": "ranks: ", "capturing": "weights: ", "serving": READY}
"""What a server has said when the stage has begun."""
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
PLANTED = {"memory": "out of memory", "exception": "a planted exception"}
"""What the rank says."""
PLUGIN = Path(__file__).parents[2] / "plait_testing" / "rank_plugin"
LIBRARIES = ("plait", "torch")
PATIENCE_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Fault:
    """One lost rank."""

    stage: str
    fault: str
    lost: int
    seconds_until_workers_gone: float
    seconds_until_server_gone: float
    exit_code: int | None
    """None: the server had to be killed."""
    last_line: str


class Lines:
    """What a process says, on both outputs, as it comes."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.said: list[str] = []
        assert process.stdout is not None
        self._thread = threading.Thread(target=lambda: self.said.extend(process.stdout or ()), daemon=True)
        self._thread.start()

    def wait_for(self, text: str) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not any(text in line for line in list(self.said)):
            if time.monotonic() > deadline:
                raise SystemExit(f"the server never said {text!r}: {''.join(self.said)[-2000:]}")
            time.sleep(0.01)


def used_bytes() -> int:
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return sum(int(line) for line in subprocess.check_output(command, text=True).split()) << 20


def lose(model: Path, num_ranks: int, is_shared: bool, stage: str, fault: str, lost: int) -> Fault:
    """Start a server, lose the rank, and wait for the end."""
    flags = ["--tp", str(num_ranks), "--num-pages", "2048"]
    command = [sys.executable, "-m", "plait.cli", "serve", str(model), "--port", "0", "--device", "cuda", *flags]
    planted = f"{stage}:{fault}:{lost}" if fault in PLANTED else ""
    plugin = {
        "PYTHONPATH": os.pathsep.join([str(PLUGIN), os.environ.get("PYTHONPATH", "")]),
        "PLAIT_TEST_SHARED_GPU": "1" * is_shared,
        "PLAIT_TEST_FAULT": planted,
    }
    server = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ | plugin
    )
    lines = Lines(server)
    workers = find_workers(server.pid, num_ranks)
    if not planted or stage == "serving":
        lines.wait_for(STAGES[stage])
    if stage == "serving":
        load_up(next(line for line in lines.said if READY in line).split()[-1])
    if planted:
        lines.wait_for(PLANTED[fault])
    else:
        workers[lost].send_signal(SIGNALS[fault])
    began = time.monotonic()
    psutil.wait_procs(list(workers.values()), timeout=PATIENCE_SECONDS)
    workers_gone = time.monotonic() - began
    exit_code = end_of(server)
    server_gone = time.monotonic() - began
    lines._thread.join(5)
    last = (lines.said or [""])[-1].strip()
    return Fault(stage, fault, lost, workers_gone, server_gone, exit_code, last)


def end_of(server: subprocess.Popen[str]) -> int | None:
    """The exit code; None if the server must be killed, with all that it started."""
    try:
        return server.wait(PATIENCE_SECONDS)
    except subprocess.TimeoutExpired:
        for process in [*psutil.Process(server.pid).children(recursive=True), server]:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        return None


def load_up(url: str) -> None:
    """Eight streams that end with the server."""

    def stream() -> None:
        body = {"prompt": "count 1 40", "stream": True, "max_tokens": 4000, "ignore_eos": True}
        with (
            suppress(httpx.HTTPError),
            httpx.stream("POST", url + "/v1/completions", json=body, timeout=60) as streamed,
        ):
            for _ in streamed.iter_lines():
                is_streaming.set()

    is_streaming = threading.Event()
    for _ in range(8):
        threading.Thread(target=stream, daemon=True).start()
    is_streaming.wait(PATIENCE_SECONDS)
    time.sleep(0.3)


def find_workers(server: int, num_ranks: int) -> dict[int, psutil.Process]:
    """By rank, as soon as all have started."""
    workers: dict[int, psutil.Process] = {}
    while len(workers) < num_ranks:
        for each in psutil.Process(server).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                words: list[str] = each.cmdline()
                if "plait_worker" in words:
                    workers[int(words[words.index("--rank") + 1])] = each
        time.sleep(0.02)
    return workers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--runs", type=int, default=1, help="of each stage and fault")
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES))
    parser.add_argument("--faults", nargs="+", choices=[*SIGNALS, *PLANTED], default=["kill"])
    parser.add_argument("--at-once", type=int, default=1, help="servers side by side, of one stage and fault")
    parser.add_argument("--one-gpu", action="store_true", help="all ranks share the first GPU")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    found: list[dict[str, object]] = []
    before = used_bytes()
    for numbers, stage, fault in itertools.product(
        batches(options.runs, options.at_once), options.stages, options.faults
    ):
        with ThreadPoolExecutor(len(numbers)) as pool:
            lost = [number % options.tp for number in numbers]
            losing = partial(lose, options.model, options.tp, options.one_gpu, stage, fault)
            batch = list(pool.map(losing, lost))
        time.sleep(0.2)
        left = used_bytes() - before
        found += [asdict(each) | {"at_once": len(numbers), "bytes_left_by_all": left} for each in batch]
        print(summary(batch, left), flush=True)
        result = {"commit": commit(), "machine": machine(), "versions": versions(LIBRARIES)}
        options.out.write_text(json.dumps(result | {"faults": found}, indent=1) + "\n")


def batches(num: int, size: int) -> list[range]:
    """The numbers below `num`, so many at a time."""
    return [range(first, min(first + size, num)) for first in range(0, num, size)]


def summary(batch: list[Fault], left: int) -> str:
    """A line for whoever waits."""
    seconds = sorted(each.seconds_until_server_gone for each in batch)
    codes = sorted({str(each.exit_code) for each in batch})
    return (
        f"{batch[0].stage} {batch[0].fault}: {seconds[0]:.2f} to {seconds[-1]:.2f} s, exit codes {' '.join(codes)}, "
        f"{left} bytes left; {batch[0].last_line}"
    )


if __name__ == "__main__":
    main()
