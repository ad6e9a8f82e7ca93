"""A shape's loads through Plait's server and through vLLM's, one after the other on the same GPU: one JSON.

    python tests/bench/gpu/beside_vllm.py --shape qwen3-8b --peer FOLDER --out FILE [-- --quantization fp8]

`--peer` is a folder with vLLM and what it needs, a path for Python's modules; it must not be Plait's. Both servers get
the same flags behind `--`, random weights (a checkpoint that is written first with `--checkpoint`), no prefix cache,
and the loads of `serve_load.py` by `plait bench serve`. vLLM has four API servers, as its figures are best. Whether
Plait's streams are right is for `serve_load.py`: here rates are compared.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
import torch
from plait.bench.result_file import commit, machine, versions

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.gpu.load_cases import LOADED, RATE, LoadCase
from bench.gpu.model_shapes import write_shape
from bench.gpu.seeded_checkpoint import write_checkpoint
from bench.gpu.serve_load import BASE_FLAGS, BENCH_SECONDS, LIBRARIES, LOADED_FLAGS, METRICS
from plait_testing.running_server import start_server

PORT = 8123
PEER_FLAGS = (
    *("--max-model-len", "16384", "--max-num-batched-tokens", "8192", "--max-num-seqs", "1024"),
    *("--no-enable-prefix-caching", "--gpu-memory-utilization", "0.85", "--api-server-count", "4"),
)
READY_SECONDS = 400.0
GOAL = 1.15
"""Of vLLM's rate, with quantised weights."""
Figures = dict[str, float]


@contextmanager
def plait_server(model: Path, flags: Sequence[str], logs: Path) -> Iterator[str]:
    """The address of Plait's server."""
    server = start_server(logs / "plait.log", model, *BASE_FLAGS, *LOADED_FLAGS, *flags)
    try:
        if not server.url:
            raise SystemExit(f"no server: {server.last_line}")
        yield server.url
    finally:
        server.stop()


@contextmanager
def vllm_server(model: Path, flags: Sequence[str], logs: Path, peer: Path) -> Iterator[str]:
    """The address of vLLM's server."""
    words = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", f"{model}", "--port", f"{PORT}"]
    environment = os.environ | {"PYTHONPATH": f"{peer}", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    with (logs / "vllm.log").open("w") as log:
        process = subprocess.Popen([*words, *PEER_FLAGS, *flags], env=environment, stdout=log, stderr=log)
    try:
        yield _ready(process, f"http://127.0.0.1:{PORT}", logs / "vllm.log")
    finally:
        process.terminate()
        process.wait(60)


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


def load(url: str, case: LoadCase, folder: Path) -> Figures:
    """A load's figures; empty if none were made."""
    command = [sys.executable, "-m", "plait.cli", "bench", "serve", "--url", url, "--no-plots", "--warmup", "4"]
    words = ["--out", f"{folder}", *case.bench_words()]
    done = subprocess.run([*command, *words], capture_output=True, text=True, timeout=BENCH_SECONDS, check=False)
    written = next(folder.glob("bench-serve*.json"), None)
    if written is None:
        print(f"plait bench ended with {done.returncode}: {done.stderr[-500:]}", flush=True)
        return {}
    return {row["metric"]: row["value"] for row in json.loads(written.read_text())["rows"] if row["metric"] in METRICS}


def load_all(name: str, url: str, cases: Sequence[LoadCase], logs: Path) -> dict[str, Figures]:
    """The figures of each load by its name."""
    found: dict[str, Figures] = {}
    for number, case in enumerate(cases):
        found[case.name] = load(url, case, logs / f"{name}-{number}")
        print(name, case.name, found[case.name], flush=True)
    return found


def rows(ours: Mapping[str, Figures], theirs: Mapping[str, Figures]) -> list[dict[str, object]]:
    """Both servers' figures, and Plait's rate over vLLM's."""
    made: list[dict[str, object]] = []
    for name in ours:
        servers = {"Plait": ours[name], "vLLM": theirs.get(name, {})}
        for server, figures in servers.items():
            made += [_row(f"{name}, {server}", metric, value) for metric, value in figures.items()]
        if all(RATE in figures for figures in servers.values()):
            ratio = servers["Plait"][RATE] / servers["vLLM"][RATE]
            made.append({"case": name, "metric": "rate_over_vllm", "unit": "times", "value": ratio, "goal": GOAL})
    return made


def _row(case: str, metric: str, value: float) -> dict[str, object]:
    return {"case": case, "metric": metric, "unit": METRICS[metric], "value": round(value, 5), "goal": None}


def write(out: Path, words: Sequence[str], peer: Path, measured: list[dict[str, object]]) -> None:
    """The results so far."""
    found = next(peer.glob("vllm-*.dist-info"), None)
    peers = {"vllm": found.name.removeprefix("vllm-").removesuffix(".dist-info")} if found else {}
    result = {
        "commit": commit(),
        "command": " ".join(["tests/bench/gpu/beside_vllm.py", *words]),
        "machine": ({"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}) | machine(),
        "versions": versions(LIBRARIES) | peers,
        "rows": measured,
    }
    out.write_text(json.dumps(result, indent=1) + "\n")


def options_of() -> argparse.Namespace:
    """What was asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=LOADED, required=True)
    parser.add_argument("--peer", type=Path, required=True, help="folder with vLLM")
    parser.add_argument("--only", default=r"^\d+/\d+ @ \d+$", help="regular expression: loads whose names match")
    parser.add_argument("--checkpoint", type=Path, help="folder in memory for a checkpoint to serve")
    parser.add_argument("--logs", type=Path, help="new folder for the servers' lines")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("flags", nargs="*", help="further flags of both servers, behind --")
    return parser.parse_args()


def main() -> None:
    options = options_of()
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
        with plait_server(model, [*options.flags, *weights], logs) as url:
            ours = load_all("Plait", url, cases, logs)
        write(options.out, sys.argv[1:], options.peer, rows(ours, {}))
        with vllm_server(model, [*options.flags, *weights], logs, options.peer) as url:
            theirs = load_all("vLLM", url, cases, logs)
    write(options.out, sys.argv[1:], options.peer, rows(ours, theirs))


if __name__ == "__main__":
    main()
