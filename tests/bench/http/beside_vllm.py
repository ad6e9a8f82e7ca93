"""The same load through `vllm bench serve` and through `plait bench serve`, against the same server.

    python tests/bench/http/beside_vllm.py --vllm VENV/bin/python --tokenizer FOLDER --out FILE

The server is a mock that keeps time, so that what differs is the clients'. Known differences: vLLM counts the last,
empty chunk as one more gap of zero (lower mean ITL), and starts its clock only when its cap lets a request go, so that
the capped open loop hides what waits.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec
from plait.bench.cases import cases
from plait.bench.compare import value
from plait.bench.measure import Bench, Measured
from plait.bench.result_file import Row, commit, machine, versions
from plait.bench.settings import BenchSettings, LoadSettings, PaceSettings

sys.path.insert(0, str(Path(__file__).parents[2]))

from plait_testing.mock_timing import Timing
from plait_testing.running_mock import running_mock

TIMING = Timing(ttft=0.1, itl=0.03, jitter=0.01)
INPUT_LEN, OUTPUT_LEN, NUM_PROMPTS, STREAMS, RATE = 100, 40, 100, 8, 10.0
NAMES = {"output_throughput": "output_tokens_per_second", "request_throughput": "requests_per_second"} | {
    f"{column}_{name}_ms": f"{ours}_{column.replace('median', 'p50')}"
    for name, ours in (("ttft", "ttft"), ("tpot", "tpot"), ("itl", "itl"), ("e2el", "e2e"))
    for column in ("mean", "median", "p90", "p99")
}
"""vLLM's name of a figure, and ours."""


def through_vllm(python: Path, tokenizer: Path, url: str, *pace: str) -> dict[str, float]:
    """vLLM's figures by our names; times in seconds."""
    with tempfile.TemporaryDirectory() as folder:
        words = "--backend openai --endpoint /v1/completions --model mock --dataset-name random --ignore-eos "
        words += f"--random-input-len {INPUT_LEN} --random-output-len {OUTPUT_LEN} --num-prompts {NUM_PROMPTS} "
        words += (
            "--percentile-metrics ttft,tpot,itl,e2el --metric-percentiles 50,90,99 --save-result --result-filename r"
        )
        command = [str(python), "-m", "vllm.entrypoints.cli.main", "bench", "serve", "--base-url", url, *words.split()]
        command += ["--tokenizer", str(tokenizer.resolve()), "--result-dir", folder, *pace]
        subprocess.run(command, check=True, capture_output=True, env={"PATH": "/usr/bin:/bin"})
        result = msgspec.json.decode((Path(folder) / "r").read_bytes())
    return {ours: result[name] / (1000 if name.endswith("_ms") else 1) for name, ours in NAMES.items()}


def through_plait(url: str, pace: PaceSettings) -> Measured:
    load = LoadSettings(num_prompts=NUM_PROMPTS, input_len=str(INPUT_LEN), output_len=str(OUTPUT_LEN))
    settings = BenchSettings(load=load, pace=pace)
    bench = Bench(settings, [url])
    return bench.measure(cases(settings)[0], bench.servers[0], 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vllm", type=Path, required=True, help="Python of an environment that has vLLM")
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder of any tokenizer, for vLLM's prompts")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    paces = {
        f"{STREAMS} streams": (PaceSettings(concurrency=STREAMS), ("--max-concurrency", str(STREAMS))),
        f"{RATE:g}/s": (PaceSettings(rate=RATE), ("--request-rate", str(RATE))),
        f"{RATE:g}/s, at most {STREAMS}": (
            PaceSettings(rate=RATE, max_concurrency=STREAMS),
            ("--request-rate", str(RATE), "--max-concurrency", str(STREAMS)),
        ),
    }
    rows: list[Row] = []
    with running_mock(TIMING) as mock:
        for case, (pace, words) in paces.items():
            ours, theirs = (
                through_plait(mock.url, pace),
                through_vllm(options.vllm, options.tokenizer, mock.url, *words),
            )
            print(f"{case}; client late: {ours.client_lag.reasons or 'no'}")
            for metric, vllm in theirs.items():
                plait = value(ours, metric)
                assert plait is not None
                print(f"  {metric:<26}{plait:>12.5f}{vllm:>12.5f}{plait / vllm:>9.3f}", flush=True)
                unit = "per second" if metric.endswith("per_second") else "seconds"
                rows += [Row(f"{case}, plait", metric, unit, plait), Row(f"{case}, vllm", metric, unit, vllm)]
    if options.out is not None:
        about = {
            "commit": commit(),
            "command": f"tests/bench/http/{Path(__file__).name}",
            "machine": machine(),
            "versions": versions(),
        }
        result = msgspec.json.encode({**about, "rows": rows})
        options.out.write_bytes(msgspec.json.format(result, indent=1) + b"\n")


if __name__ == "__main__":
    main()
