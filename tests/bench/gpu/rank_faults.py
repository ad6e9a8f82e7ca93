"""What a lost rank costs: seconds until all processes and their GPU memory are gone, and the named cause.

    python tests/bench/gpu/rank_faults.py --model tests/models/recall-gqa --tp 2 --runs 20 --out FILE

One rank is lost while it loads, captures or serves eight streams: `kill` is SIGKILL; `stop` SIGSTOP, of which nothing
tells but a peer that does not come; `memory` asks for more GPU memory than there is; `exception` is a bug. Seconds
count from the signal, or from the line by which the rank says what has happened to it. With `--one-gpu` all ranks share
the first GPU (`rank_plugin`).
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
from contextlib import suppress
from dataclasses import asdict, dataclass
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
    bytes_left: int
    """On all GPUs, against before the start."""
    exit_code: int
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


def lose(model: Path, num_ranks: int, stage: str, fault: str, lost: int, is_shared: bool) -> Fault:
    """Start a server, lose the rank, and wait for the end."""
    flags = ["--tp", str(num_ranks), *(["--num-pages", "2048"] if is_shared else [])]
    before = used_bytes()
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
    exit_code = server.wait(PATIENCE_SECONDS)
    server_gone = time.monotonic() - began
    time.sleep(0.2)
    lines._thread.join(5)
    last = (lines.said or [""])[-1].strip()
    return Fault(stage, fault, lost, workers_gone, server_gone, used_bytes() - before, exit_code, last)


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
    parser.add_argument("--one-gpu", action="store_true", help="all ranks share the first GPU")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    found: list[Fault] = []
    for number, stage, fault in itertools.product(range(options.runs), options.stages, options.faults):
        found.append(lose(options.model, options.tp, stage, fault, number % options.tp, options.one_gpu))
        print(found[-1], flush=True)
        result = {"commit": commit(), "machine": machine(), "versions": versions(LIBRARIES)}
        options.out.write_text(json.dumps(result | {"faults": [asdict(each) for each in found]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
