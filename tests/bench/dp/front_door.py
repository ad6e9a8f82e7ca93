"""How many streamed tokens a second one front door writes, over replicas that only pretend to compute.

    python tests/bench/dp/front_door.py --out tests/bench/results/dp-front-door.json

Starts `plait serve --dp N` with `mock_worker.py` in place of the workers, and loads it with `plait bench`'s client. The
goals are 40,000 tokens a second at 512 streams and 80,000 at 1,024. A run whose client was late does not count. It also
measures processor time, which other work on the machine hardly changes: that of a token, by thread, and that of the
engine while nothing runs. `--server-core N` holds the server, without its workers, to one core; the goal is then
100,000 at 256 streams.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import psutil
from plait.bench.cases import cases
from plait.bench.measure import Bench, Measured
from plait.bench.result_file import Row, commit, machine, versions
from plait.bench.settings import BenchSettings, LoadSettings, MeasureSettings, PaceSettings

sys.path.insert(0, str(Path(__file__).parents[2]))

from plait_testing.running_server import Server, start_server

ROOT = Path(__file__).resolve().parents[3]
GOALS = {512: 40_000.0, 1024: 80_000.0}
"""Tokens a second by streams."""
ONE_CORE_GOALS = {256: 100_000.0}
"""The same, with the server on one core."""
MODEL = ROOT / "tests/models/recall-gqa"
MOCK = Path(__file__).with_name("mock_worker.py")
IDLE_SECONDS = 5.0


@contextmanager
def mock_server(num_replicas: int, step_ms: float, max_seqs: int, *more: str, model: Path = MODEL) -> Iterator[Server]:
    """`plait serve` whose workers are mocks."""
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / "plait_worker"
        package.mkdir()
        # Without it the real package goes first, wherever it stands in the path.
        (package / "__init__.py").touch()
        (package / "__main__.py").write_text(f"import runpy\nrunpy.run_path({str(MOCK)!r}, run_name='__main__')\n")
        before = os.environ.get("PYTHONPATH", "")
        os.environ |= {"PYTHONPATH": os.pathsep.join([folder, before]), "MOCK_STEP_MS": str(step_ms)}
        flags = ["--dp", str(num_replicas), "--max-seqs", str(max_seqs), "--max-batch-tokens", "8192"]
        running = start_server(Path(folder) / "server.log", model, *flags, *more, "--log-level", "warning")
        try:
            assert running.url, running.errors
            yield running
        finally:
            running.kill()
            os.environ["PYTHONPATH"] = before


def load(url: str, num_streams: int, output_len: int, num_processes: int) -> Measured:
    """A closed loop in which every stream sends two requests."""
    settings = BenchSettings(
        load=LoadSettings(
            num_prompts=2 * num_streams, input_len="16", output_len=str(output_len), token_range="40-80", salt="mock"
        ),
        pace=PaceSettings(concurrency=num_streams),
        measure=MeasureSettings(processes=num_processes),
    )
    bench = Bench(settings, [url])
    return bench.measure(cases(settings)[0], bench.servers[0], 0)


def cpu_seconds(process: int) -> dict[str, float]:
    """Processor time so far of each kind of thread in a process; the engine's main thread is the HTTP server."""
    used: collections.defaultdict[str, float] = collections.defaultdict(float)
    for thread in psutil.Process(process).threads():
        used[thread_name(process, thread.id)] += int(_of_thread(process, thread.id, "schedstat").split()[0]) / 1e9
    return dict(used)


def thread_name(process: int, thread: int) -> str:
    """As the engine names it, such as `plait-driver`; `other` is mostly libzmq's input and output."""
    if thread == process:
        return "main"
    name = _of_thread(process, thread, "comm").strip()
    return name if name.startswith("plait-") else "other"


def _of_thread(process: int, thread: int, name: str) -> str:
    return Path(f"/proc/{process}/task/{thread}/{name}").read_text()


def hold_to_core(process: int, core: int) -> None:
    """Every thread of a process; those that it started stay free."""
    for thread in psutil.Process(process).threads():
        os.sched_setaffinity(thread.id, {core})


def idle_share(running: Server) -> float:
    """Of one core, that the engine's process takes while nothing runs."""
    before = sum(cpu_seconds(running.process.pid).values())
    time.sleep(IDLE_SECONDS)
    return (sum(cpu_seconds(running.process.pid).values()) - before) / IDLE_SECONDS


def measure(options: argparse.Namespace) -> Iterator[Row]:
    """A row for each figure."""
    for num_replicas in options.replicas:
        case = f"dp {num_replicas}, steps of {options.step_ms:g} ms"
        if options.server_core is not None:
            case += ", server on one core"
        with mock_server(num_replicas, options.step_ms, max(options.streams)) as running:
            if options.server_core is not None:
                hold_to_core(running.process.pid, options.server_core)
            yield Row(f"{case}, idle", "engine_cpu", "cores", idle_share(running))
            for num_streams in options.streams:
                yield from measure_streams(running, f"{case}, {num_streams} streams", num_streams, options)


def measure_streams(running: Server, name: str, num_streams: int, options: argparse.Namespace) -> Iterator[Row]:
    """Rate and processor time with so many streams."""
    before = cpu_seconds(running.process.pid)
    measured = load(running.url, num_streams, options.output_len, options.processes)
    after = cpu_seconds(running.process.pid)
    late = measured.client_lag.reasons
    rate = measured.metrics.output_tokens_per_second
    print(f"{name}: {rate:,.0f} tokens/s", *late)
    goals = GOALS if options.server_core is None else ONE_CORE_GOALS
    yield Row(name, "output_tokens_per_second", "tokens/s", rate, None if late else goals.get(num_streams))
    yield Row(name, "client_was_late", "runs", float(bool(late)))
    num_tokens = 2 * num_streams * options.output_len
    used = {thread: seconds - before.get(thread, 0.0) for thread, seconds in after.items()}
    yield Row(name, "engine_cpu_per_token", "seconds", sum(used.values()) / num_tokens)
    for thread, seconds in sorted(used.items()):
        if seconds > 0:
            yield Row(name, f"{thread}_cpu_per_token", "seconds", seconds / num_tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2, 8])
    parser.add_argument("--streams", type=int, nargs="+", default=[512, 1024])
    parser.add_argument("--step-ms", type=float, default=5.0)
    parser.add_argument("--output-len", type=int, default=512)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--server-core", type=int)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = list(measure(options))
    for row in rows:
        print(json.dumps(msgspec.to_builtins(row)))
    if options.out is not None:
        command = f"tests/bench/dp/{Path(__file__).name} {' '.join(sys.argv[1:])}".strip()
        result = {
            "commit": commit(),
            "command": command,
            "machine": machine(),
            "versions": versions(("plait", "msgspec")),
            "rows": rows,
        }
        options.out.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")


if __name__ == "__main__":
    main()
