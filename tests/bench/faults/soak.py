"""Hours of mixed load and random faults: answers stay right, and memory, descriptors and pages as they were.

    make soak SOAK_SECONDS=7200
    PYTHONPATH=tests python tests/bench/faults/soak.py --seconds 7200 --seed 1 --out tests/bench/results/soak.json

Half of the time for each layout: two replicas of two ranks behind one `plait serve --restart group`, and the same on
two nodes (network namespaces) by `plait launch --restart group`. Clients ask recall problems, plain, constrained and
several choices at once, sample, and hang up. Every `--every` seconds one fault strikes. Then the load goes on, rests,
and at rest no page is leased, and the processes that live throughout are weighed. The same seed draws the same load and
faults; what meets what depends on time. Exit code 1: something was lost, wrong or grew.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import httpx
import psutil
from plait.bench.result_file import commit, machine, versions
from plait.nodes.key_files import write_new_keys
from plait_testing import recall
from plait_testing.metrics import parse_metrics
from plait_testing.node_network import (
    NodeNetwork,
    enter_namespace,
    exhaust_memory,
    reason_without_namespaces,
    workers_of,
)
from plait_testing.running_server import Server, start_server, wait_until_ready

MODEL = Path(__file__).resolve().parents[2] / "models" / "recall-gqa"
RESTART = ("--restart", "group", "--restart-budget", "1000")
FLAGS = ("--tp", "2", "--dp", "2", "--max-model-len", "1024", *RESTART)
NUM_CLIENTS = 6
CONTEXT = 512
NUM_PROBLEMS = 20
"""Each has grammars of its own. The engine keeps them with what their masks needed: memory is flat once it has them
all, after 80 s with so few, and after hours with 200."""
IDLE_SECONDS, READY_SECONDS = 120.0, 180.0
MEMORY_SECONDS = 20.0
POLL_SECONDS = 0.1
PAUSE_SECONDS = 1.0
"""Of a client whose server is not there."""
MOST_GROWTH = 1.1
"""Of the resident memory, from the median of the first third of the rests to that of the last."""
MOST_MORE_FILES = 8


@dataclass
class Door:
    """Where clients connect, and from which network."""

    server: Server
    nodes: Sequence[Server]
    namespace: str | None
    keeps_streams: bool
    """Whether a lost rank costs its streams a pause only."""
    faults: Sequence[str]

    def enter(self) -> None:
        """Give the calling thread the network in which the server listens."""
        if self.namespace is not None:
            enter_namespace(self.namespace)

    def ranks(self) -> list[psutil.Process]:
        """Of all nodes; none while one of them ends."""
        with suppress(psutil.Error):
            return [rank for node in self.nodes for rank in workers_of(node)]
        return []

    def lasting(self) -> list[psutil.Process]:
        """The launchers, or the server: what lives through all faults."""
        return [psutil.Process(node.process.pid) for node in self.nodes]

    def get(self, path: str) -> httpx.Response:
        return httpx.get(f"{self.server.url}{path}", timeout=30)

    def is_ready(self) -> bool:
        with suppress(httpx.HTTPError):
            return self.get("/ready").status_code == 200
        return False


Asked = Callable[[httpx.Client, random.Random], str]


def answered(client: httpx.Client, draw: random.Random, **fields: object) -> str:
    """A recall problem: `right`, `wrong`, or the server's status."""
    (problem,) = recall.problems(draw.randrange(NUM_PROBLEMS), 1, CONTEXT)
    constraint = recall.constraint(draw.randrange(4), problem) if "n" not in fields else {}
    given = recall.ask(client, problem, MODEL.name, **fields, **constraint)
    if given.startswith("HTTP "):
        return given[:160]
    return "right" if given == problem["answer"] else f"wrong: {given!r} for {problem['answer']!r}"


def several_choices(client: httpx.Client, draw: random.Random) -> str:
    return answered(client, draw, n=draw.randint(2, 4))


def sampled(client: httpx.Client, draw: random.Random) -> str:
    body = {"prompt": f"count {draw.randint(1, 9)} 9", "max_tokens": draw.randint(1, 80), "ignore_eos": True}
    got = client.post("/v1/completions", json=body | {"temperature": 1.0, "seed": draw.randrange(1 << 20)})
    if got.status_code != 200:
        return f"HTTP {got.status_code}: {got.text}"[:160]
    return "right" if got.json()["usage"]["completion_tokens"] == body["max_tokens"] else "wrong: number of tokens"


def hung_up(client: httpx.Client, draw: random.Random) -> str:
    body = {"prompt": f"count {draw.randint(1, 9)} 9", "max_tokens": 200, "ignore_eos": True, "stream": True}
    with client.stream("POST", "/v1/completions", json=body) as got:
        if got.status_code != 200:
            return f"HTTP {got.status_code}: {got.read().decode()}"[:160]
        for _, _line in zip(range(draw.randint(0, 30)), got.iter_lines(), strict=False):
            pass
    return "hung up"


REQUESTS: tuple[Asked, ...] = (answered, answered, answered, several_choices, sampled, hung_up)


class Load:
    """Clients that ask one request after the other, and rest together."""

    def __init__(self, door: Door, seed: int) -> None:
        self.outcomes = Counter[str]()
        self._door, self._over = door, False
        self._may_ask = threading.Event()
        self._lock = threading.Lock()
        self._num_busy = 0
        self._threads = [threading.Thread(target=self._run, args=(seed + i,)) for i in range(NUM_CLIENTS)]
        for each in self._threads:
            each.start()

    def go_on(self) -> None:
        self._may_ask.set()

    def rest(self) -> None:
        """Return once every client has its last answer. Raises `TimeoutError` if one waits for ever."""
        self._may_ask.clear()
        wait_for(lambda: self._num_busy == 0, IDLE_SECONDS, "a client has no answer")

    def end(self) -> None:
        self._over = True
        self._may_ask.set()
        for each in self._threads:
            each.join()

    def _run(self, seed: int) -> None:
        self._door.enter()
        draw = random.Random(seed)
        with httpx.Client(base_url=self._door.server.url, timeout=IDLE_SECONDS) as client:
            while self._may_ask.wait() and not self._over:
                with self._lock:
                    self._num_busy += 1
                outcome = self._outcome(draw.choice(REQUESTS), client, draw)
                with self._lock:
                    self.outcomes[outcome] += 1
                    self._num_busy -= 1
                if outcome.startswith(("HTTP", "no answer")):
                    time.sleep(PAUSE_SECONDS)

    def _outcome(self, asked: Asked, client: httpx.Client, draw: random.Random) -> str:
        try:
            return asked(client, draw)
        except (httpx.HTTPError, KeyError, ValueError) as error:
            return f"no answer: {type(error).__name__}"


def wait_for(holds: Callable[[], bool], seconds: float, why: str) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{why} for {seconds:g} s")
        time.sleep(POLL_SECONDS)


FAULTS: dict[str, Callable[[psutil.Process], object]] = {
    "kill -9": lambda rank: rank.send_signal(signal.SIGKILL),
    "SIGSTOP": lambda rank: rank.send_signal(signal.SIGSTOP),
    "no more memory": exhaust_memory,
    "none": lambda rank: None,
}


@dataclass
class Soak:
    """One layout's run."""

    door: Door
    draw: random.Random
    load: Load
    faults: Counter[str] = field(default_factory=Counter)
    rests: list[dict[str, float]] = field(default_factory=list)
    recoveries: list[float] = field(default_factory=list)
    orphans: int = 0
    requests_moved: float = 0
    """To another replica, which only a server that lives throughout can count."""

    def run(self, seconds: float, every: float) -> None:
        self.door.enter()
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.load.go_on()
            time.sleep(every / 2)
            self._strike()
            time.sleep(every / 2)
            self.load.rest()
            self.rests.append(self._weigh())

    def _strike(self) -> None:
        name = self.draw.choice(self.door.faults)
        wait_for(self._is_whole, READY_SECONDS, "the server is not whole")
        before = self.door.ranks()
        struck = self.draw.choice(before)
        FAULTS[name](struck)
        self.faults[name] += 1
        begun = time.monotonic()
        if name == "no more memory":
            finish(struck)
        if name != "none":
            wait_for(lambda: not is_there(struck), IDLE_SECONDS, "a struck rank is there")
        wait_for(self._is_whole, READY_SECONDS, "the server is not whole again")
        self.recoveries.append(time.monotonic() - begun)
        gone = {rank.pid for rank in before} - {rank.pid for rank in self.door.ranks()}
        self.orphans += sum(is_there(rank) for rank in before if rank.pid in gone)

    def _is_whole(self) -> bool:
        return len(self.door.ranks()) == 4 and self.door.is_ready()

    def _weigh(self) -> dict[str, float]:
        """Memory, descriptors and leased pages of a server without requests."""
        wait_for(lambda: self._leased() == 0, IDLE_SECONDS, "pages are leased without a request")
        self.requests_moved = self._sum("plait_requests_moved_total")
        processes = self.door.lasting()
        return {
            "resident_mb": sum(each.memory_info().rss for each in processes) / 1e6,
            "files": sum(each.num_fds() for each in processes),
            "threads": sum(each.num_threads() for each in processes),
        }

    def _leased(self) -> float:
        return self._sum("plait_kv_pages{", "leased") + self._sum("plait_requests_running")

    def _sum(self, start: str, within: str = "") -> float:
        """Of the metrics with such names, over all replicas."""
        samples = parse_metrics(self.door.get("/metrics").raise_for_status().text)
        return sum(value for name, value in samples.items() if name.startswith(start) and within in name)


def finish(rank: psutil.Process) -> None:
    """Kill a rank that goes on for long without asking for more memory."""
    with suppress(TimeoutError):
        wait_for(lambda: not is_there(rank), MEMORY_SECONDS, "")
    with suppress(psutil.NoSuchProcess):
        rank.kill()


def is_there(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


@contextmanager
def on_one_host(folder: Path) -> Iterator[Door]:
    server = start_server(folder / "serve.log", MODEL, *FLAGS, "--threads", "1")
    try:
        assert server.url, server.errors
        yield Door(server, [server], None, keeps_streams=True, faults=tuple(FAULTS))
    finally:
        server.kill()


@contextmanager
def on_two_nodes(folder: Path) -> Iterator[Door]:
    with NodeNetwork(2) as network:
        write_new_keys(folder / "keys", 2)
        nodes = network.launch_all(folder, MODEL, folder / "keys", *FLAGS, "--port", "8000")
        wait_until_ready(nodes[0])
        assert nodes[0].url, nodes[0].errors
        # A launcher takes a rank without memory for wrong hardware, and ends.
        faults = [name for name in FAULTS if name != "no more memory"]
        yield Door(nodes[0], nodes, network.namespace(0), keeps_streams=False, faults=faults)


LAYOUTS = {"one host": on_one_host, "two nodes": on_two_nodes}


def soaked(layout: str, seconds: float, every: float, seed: int) -> dict[str, object]:
    """The row of a layout."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        door = stack.enter_context(LAYOUTS[layout](folder))
        soak = Soak(door, random.Random(seed), Load(door, seed))
        failure = None
        try:
            # A thread that enters a network never leaves it.
            with ThreadPoolExecutor(1) as thread:
                thread.submit(soak.run, seconds, every).result()
        except (TimeoutError, httpx.HTTPError, psutil.Error) as error:
            failure = f"{type(error).__name__}: {error}; the server's last line: {door.server.last_line}"
        finally:
            soak.load.end()
    return row_of(layout, seconds, soak, failure)


def row_of(layout: str, seconds: float, soak: Soak, failure: str | None) -> dict[str, object]:
    third = max(1, len(soak.rests) // 3)
    first, last = ({} if not soak.rests else middle(part) for part in (soak.rests[:third], soak.rests[-third:]))
    wrong = [outcome for outcome in soak.load.outcomes if outcome.startswith("wrong")]
    orphans = f"{soak.orphans} orphans" if soak.orphans else None
    return {
        "layout": layout,
        "seconds": seconds,
        "faults": dict(soak.faults),
        "outcomes": dict(soak.load.outcomes.most_common(30)),
        "recovery_seconds_p50": round(median(soak.recoveries), 2) if soak.recoveries else None,
        "recovery_seconds_max": round(max(soak.recoveries), 2) if soak.recoveries else None,
        "orphans": soak.orphans,
        "requests_moved": soak.requests_moved,
        "rests": len(soak.rests),
        "first": first,
        "last": last,
        "failures": [each for each in (failure, orphans, *wrong, *lost(soak), *grown(first, last)) if each],
    }


def middle(rests: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: round(median(rest[name] for rest in rests), 1) for name in rests[0]}


def lost(soak: Soak) -> list[str]:
    """Requests without their answer where none may be lost; two losses in a row may end one by name."""
    if not soak.door.keeps_streams:
        return []
    kept = ("right", "wrong", "hung up")
    return [each for each in soak.load.outcomes if not each.startswith(kept) and "took_workers_down" not in each]


def grown(first: dict[str, float], last: dict[str, float]) -> list[str]:
    if not first:
        return ["no rest was reached"]
    said = []
    if last["resident_mb"] > MOST_GROWTH * first["resident_mb"]:
        said.append(f"memory grew from {first['resident_mb']} to {last['resident_mb']} MB")
    said += [
        f"{name} grew from {first[name]} to {last[name]}"
        for name in ("files", "threads")
        if last[name] > first[name] + MOST_MORE_FILES
    ]
    return said


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=7200)
    parser.add_argument("--every", type=float, default=20, help="seconds of load for each fault")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--layout", choices=LAYOUTS, action="append")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(argv)
    layouts = options.layout or list(LAYOUTS)
    if "two nodes" in layouts and (reason := reason_without_namespaces()):
        print(f"soak: no two nodes here: {reason}; choose --layout 'one host'", file=sys.stderr)
        return 2
    rows = []
    for layout in layouts:
        rows.append(soaked(layout, options.seconds / len(layouts), options.every, options.seed))
        print(json.dumps(rows[-1], indent=1), flush=True)
    if options.out is not None:
        command = " ".join(["tests/bench/faults/soak.py", *argv]).replace(f"{options.out}", options.out.name)
        record = {"commit": commit(), "command": command, "machine": machine(), "versions": versions(), "rows": rows}
        options.out.write_text(json.dumps(record, indent=1) + "\n")
    return int(any(row["failures"] for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
