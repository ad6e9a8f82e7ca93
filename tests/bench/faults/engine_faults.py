"""The engine's end: killed, or drained while another server takes the load."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import httpx
import psutil
from bench.faults.fault_rows import Result, Run
from bench.faults.held_server import HeldServer, held_server, serving
from bench.faults.observe import LEFT_SECONDS, is_there, orphans, reaches
from bench.faults.streams import losses
from plait_testing.running_server import Server

NUM_CLIENTS = 4
DELAY_SECONDS = 1.0
"""From SIGTERM to the drain: a balancer looks at `/ready` more often."""
ANSWERED = {"max_tokens": 64, "ignore_eos": True, "temperature": 0, "logprobs": 0}


@contextmanager
def engine_killed(folder: Path) -> Iterator[Run]:
    """Each run has a server of its own."""

    def run() -> Result:
        with held_server(folder) as held:
            reaches(lambda: bool(held.running.spares()), LEFT_SECONDS)
            return kill_engine(held, folder)

    yield run


def kill_engine(held: HeldServer, folder: Path) -> Result:
    """Kill -9 while ranks compute; the clients have what was computed, and no more."""
    streams = held.under_way()
    processes = [*held.running.workers(), *held.running.spares()]
    struck = time.monotonic()
    held.running.process.kill()
    held.steps.end()
    reaches(lambda: not any(map(is_there, processes)), LEFT_SECONDS)
    gone = time.monotonic()
    left = [process for process in processes if is_there(process)]
    for one in streams:
        one.join(LEFT_SECONDS)
    silent = [one for one in streams if one.is_alive()]
    for process in left:
        process.kill()
    prefixes = [expected[: len(one.tokens)] for one, expected in zip(streams, held.right, strict=True)]
    return {
        "stream_closed_seconds": max(one.ended_at - struck for one in streams),
        "workers_gone_seconds": gone - struck,
        "failures": len(silent),
        **losses([one.tokens for one in streams], prefixes),
        "orphans": len(left),
    }


class Client(threading.Thread):
    """One of a balancer's: asks one request after the other of a server that takes them."""

    def __init__(self, number: int, servers: Sequence[str], over: threading.Event) -> None:
        super().__init__()
        self._body = {"prompt": f"count {number} 9"} | ANSWERED
        self._servers, self._over = servers, over
        self._turn = number
        self.given: list[list[str]] = []
        self.failures: list[str] = []
        self.start()

    def run(self) -> None:
        with httpx.Client(timeout=LEFT_SECONDS) as client:
            while not self._over.is_set():
                self._turn += 1
                for url in filter(partial(is_ready, client), self._in_turn()):
                    if self._has_outcome(client, url):
                        break

    def _has_outcome(self, client: httpx.Client, url: str) -> bool:
        """False: the request was not taken, and goes to the next server."""
        try:
            answer = client.post(f"{url}/v1/completions", json=self._body)
            if answer.status_code == 503:
                return False
            self.given.append(answer.raise_for_status().json()["choices"][0]["logprobs"]["tokens"])
        except httpx.ConnectError:
            return False
        except httpx.HTTPError as error:
            self.failures.append(f"{type(error).__name__}: {error}")
        return True

    def _in_turn(self) -> list[str]:
        first = self._turn % len(self._servers)
        return [*self._servers[first:], *self._servers[:first]]


def is_ready(client: httpx.Client, url: str) -> bool:
    """What a balancer asks."""
    try:
        return client.get(f"{url}/ready").status_code == 200
    except httpx.HTTPError:
        return False


@contextmanager
def rolling_drain(folder: Path) -> Iterator[Run]:
    """One server is drained and started anew, and clients see neither."""
    with serving(folder, log=folder / "stays") as stays:
        right = [whole_answer(stays.url, number) for number in range(NUM_CLIENTS)]

        def run() -> Result:
            with serving(folder, "--shutdown-delay-seconds", str(DELAY_SECONDS)) as leaves:
                return drain(leaves, stays, right)

        yield run


def whole_answer(url: str, number: int) -> list[str]:
    body = {"prompt": f"count {number} 9"} | ANSWERED
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60).raise_for_status()
    tokens: list[str] = answer.json()["choices"][0]["logprobs"]["tokens"]
    return tokens


def drain(leaves: Server, stays: Server, right: Sequence[Sequence[str]]) -> Result:
    """SIGTERM of one under load."""
    ranks: list[psutil.Process] = psutil.Process(leaves.process.pid).children(recursive=True)
    over = threading.Event()
    clients = [Client(number, (leaves.url, stays.url), over) for number in range(NUM_CLIENTS)]
    wait_for_answers(clients)
    struck = time.monotonic()
    code = leaves.stop(signal.SIGTERM)
    drained = time.monotonic() - struck
    wait_for_answers(clients)
    over.set()
    for client in clients:
        client.join()
    given = [(one, right[number]) for number, client in enumerate(clients) for one in client.given]
    return {
        "drain_seconds": drained,
        "answers": len(given),
        "failures": sum(len(client.failures) for client in clients) + (code != 0),
        **losses([one for one, _ in given], [expected for _, expected in given]),
        "orphans": orphans(ranks),
    }


def wait_for_answers(clients: Sequence[Client]) -> None:
    """Until each has another one."""
    before = [len(client.given) for client in clients]
    reaches(lambda: all(len(client.given) > num for client, num in zip(clients, before, strict=True)), LEFT_SECONDS)
