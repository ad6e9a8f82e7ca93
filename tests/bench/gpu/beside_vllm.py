"""A shape's loads through vLLM's server, and Plait's rates over vLLM's on the same GPU: one JSON.

    python tests/bench/gpu/serve_load.py --shape qwen3-8b-fp8 --out OURS -- --quantization fp8
    python tests/bench/gpu/beside_vllm.py --shape qwen3-8b-fp8 --peer FOLDER --ours OURS --out OUT -- --quantization fp8

`--peer` is a folder with vLLM and what it needs, a path for Python's modules; it must not be Plait's. vLLM gets random
weights (a checkpoint that is written first with `--checkpoint`), no prefix cache, four API servers, with which its
figures are best, and the loads of `serve_load.py` by `plait bench serve`. Plait's figures are those that
`serve_load.py` wrote on the same machine in the same hour; `--theirs FILE` compares with what was measured before.
Several of these may start their servers at once, each on a `--port` of its own: with one `--turns FILE` one at a time
runs its loads. Then the cache's bytes are to be given (`--kv-cache-memory-bytes`), which vLLM else takes from
what the others leave.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import torch
from plait.bench.result_file import commit, machine, versions

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.gpu.load_cases import LOADED, RATE, LoadCase
from bench.gpu.model_shapes import write_shape
from bench.gpu.seeded_checkpoint import write_checkpoint
from bench.gpu.serve_load import BENCH_SECONDS, LIBRARIES, METRICS

PEER_FLAGS = (
    *("--max-model-len", "16384", "--max-num-batched-tokens", "8192", "--max-num-seqs", "1024"),
    *("--no-enable-prefix-caching", "--gpu-memory-utilization", "0.85", "--api-server-count", "4"),
)
READY_SECONDS = 400.0
GOAL = 1.15
"""Of vLLM's rate, with quantised weights."""
Row = dict[str, Any]


@contextmanager
def vllm_server(model: Path, port: int, flags: Sequence[str], logs: Path, peer: Path) -> Iterator[str]:
    """The address of vLLM's server."""
    words = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", f"{model}", "--port", f"{port}"]
    # It compiles flashinfer's kernels, which Plait's environment may forbid.
    kept = {name: value for name, value in os.environ.items() if name != "FLASHINFER_DISABLE_JIT"}
    environment = kept | {"PYTHONPATH": f"{peer}", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    with (logs / "vllm.log").open("w") as log:
        process = subprocess.Popen([*words, *PEER_FLAGS, *flags], env=environment, stdout=log, stderr=log)
    try:
        yield _ready(process, f"http://127.0.0.1:{port}", logs / "vllm.log")
    finally:
        process.terminate()
        process.wait(60)


@contextmanager
def turn(file: Path | None) -> Iterator[None]:
    """While no other that was given the same file has its turn."""
    if file is None:
        yield
        return
    with file.open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield


def _ready(process: subprocess.Popen[bytes], url: str, log: Path) -> str:
    deadline = time.monotonic() + READY_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        try:
            if httpx.get(f"{url}/health", timeout=1).is_success:
                return url
        except httpx.TransportError:
            pass
        time.sleep(1)
    raise SystemExit(f"no vLLM: {log.read_text()[-2000:]}")


def load(url: str, case: LoadCase, folder: Path) -> dict[str, float]:
    """A load's figures; empty if none were made."""
    command = [sys.executable, "-m", "plait.cli", "bench", "serve", "--url", url, "--no-plots", "--warmup", "4"]
    words = ["--out", f"{folder}", *case.bench_words()]
    done = subprocess.run([*command, *words], capture_output=True, text=True, timeout=BENCH_SECONDS, check=False)
    written = next(folder.glob("bench-serve*.json"), None)
    if written is None:
        print(f"plait bench ended with {done.returncode}: {done.stderr[-500:]}", flush=True)
        return {}
    return {row["metric"]: row["value"] for row in json.loads(written.read_text())["rows"] if row["metric"] in METRICS}


def load_all(url: str, cases: Sequence[LoadCase], logs: Path) -> Iterator[Row]:
    """The figures of each load."""
    for number, case in enumerate(cases):
        figures = load(url, case, logs / f"bench-{number}")
        print(case.name, figures, flush=True)
        for metric, value in figures.items():
            yield {"case": case.name, "metric": metric, "unit": METRICS[metric], "value": round(value, 5), "goal": None}


def ratios(ours: Sequence[Row], theirs: Sequence[Row]) -> Iterator[Row]:
    """Plait's rate over vLLM's, of the loads that both ran."""
    of_ours, of_theirs = (
        {row["case"]: row["value"] for row in rows if row["metric"] == RATE} for rows in (ours, theirs)
    )
    for case in of_theirs:
        if case in of_ours:
            ratio = of_ours[case] / of_theirs[case]
            yield {"case": case, "metric": "rate_over_vllm", "unit": "times", "value": round(ratio, 4), "goal": GOAL}


def rows_in(file: Path | None) -> list[Row]:
    """Of a result; none without one."""
    found: list[Row] = json.loads(file.read_text())["rows"] if file else []
    return found


def write(out: Path, words: Sequence[str], peer: Path, measured: Sequence[Row]) -> None:
    """The results so far."""
    found = next(peer.glob("vllm-*.dist-info"), None)
    peers = {"vllm": found.name.removeprefix("vllm-").removesuffix(".dist-info")} if found else {}
    result = {
        "commit": commit(),
        "command": " ".join(["tests/bench/gpu/beside_vllm.py", *words]),
        "machine": ({"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}) | machine(),
        "versions": versions(LIBRARIES) | peers,
        "rows": list(measured),
    }
    out.write_text(json.dumps(result, indent=1) + "\n")


def options_of() -> argparse.Namespace:
    """What was asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=LOADED, required=True)
    parser.add_argument("--peer", type=Path, required=True, help="folder with vLLM")
    parser.add_argument("--ours", type=Path, help="what serve_load.py wrote of Plait")
    parser.add_argument("--theirs", type=Path, help="what this wrote of vLLM; nothing runs then")
    parser.add_argument("--only", default=r"^\d+/\d+ @ \d+$", help="regular expression: loads whose names match")
    parser.add_argument("--checkpoint", type=Path, help="folder in memory for a checkpoint to serve")
    parser.add_argument("--port", type=int, default=8123, help="of vLLM's server")
    parser.add_argument("--turns", type=Path, help="file of those that run at once, of which one measures at a time")
    parser.add_argument("--logs", type=Path, help="new folder for the servers' lines")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("flags", nargs="*", help="further flags of vLLM, behind --")
    return parser.parse_args()


def measured(options: argparse.Namespace) -> list[Row]:
    """vLLM's figures, run now."""
    loaded = LOADED[options.shape]
    cases = loaded.chosen(lambda case: re.search(options.only, case.name) is not None)
    with TemporaryDirectory() as kept:
        logs = options.logs or Path(kept) / "logs"
        logs.mkdir(parents=True)
        model = (options.checkpoint or Path(kept)) / loaded.shape
        write_shape(loaded.shape, model)
        if options.checkpoint and not any(model.glob("*.index.json")):
            write_checkpoint(model)
        weights = () if options.checkpoint else ("--load-format", "dummy")
        server = vllm_server(model, options.port, [*options.flags, *weights], logs, options.peer)
        with server as url, turn(options.turns):
            return list(load_all(url, cases, logs))


def main() -> None:
    options = options_of()
    theirs = rows_in(options.theirs) or measured(options)
    write(options.out, sys.argv[1:], options.peer, [*theirs, *ratios(rows_in(options.ours), theirs)])


if __name__ == "__main__":
    main()
