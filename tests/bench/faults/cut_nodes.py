"""Two nodes of `plait launch --restart group` whose network breaks: both end, and start again when it is back.

The nodes are network namespaces; a replica of two ranks spans them, and its streams are asked on the head. They end
with an error, as docs/multi-node.md says: what they brought must be the start of their answers.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import httpx
import psutil
from bench.faults.fault_rows import Result, Run
from bench.faults.held_server import RECALL
from bench.faults.observe import LEFT_SECONDS, is_there, leaked_pages, orphans, reaches
from bench.faults.streams import answers, ask, losses
from plait.nodes.key_files import write_new_keys
from plait_testing.node_network import NodeNetwork, enter_namespace
from plait_testing.running_server import Server, wait_until_ready
from plait_testing.slow_steps import SlowSteps

PORT = 8000
URL = f"http://127.0.0.1:{PORT}"
"""Within the head's network."""
FLAGS = ("--tp", "2", "--max-model-len", "1024", "--dtype", "float32", "--meet-timeout-seconds", "120")
RESTART = ("--restart", "group", "--restart-budget", "1000")
MEETING_PORT, RANKS_PORT = 7450, 7451
LONG = {"max_tokens": 400}
"""Longer than it takes to notice: slowed, over half a minute."""
SERVING_SECONDS = 120.0


@dataclass(frozen=True)
class Nodes:
    """Two that serve, and the answers that they give without a fault."""

    network: NodeNetwork
    servers: Sequence[Server]
    steps: SlowSteps
    right: list[list[str]]

    def processes(self) -> list[psutil.Process]:
        """Engines and ranks; the launchers live on."""
        return [process for one in self.servers for process in one.workers()]


Cut = Callable[[NodeNetwork], None]


def partition(folder: Path) -> AbstractContextManager[Run]:
    """Nothing passes between the nodes: one is cut off, then the head."""
    return in_turn(folder, *(partial(NodeNetwork.cut_off, node=node) for node in (1, 0)))


def half_open(folder: Path) -> AbstractContextManager[Run]:
    """What node 1 sends over one port does not arrive: the ranks', then the launchers'."""
    return in_turn(folder, *(partial(NodeNetwork.drop_port, node=1, port=port) for port in (RANKS_PORT, MEETING_PORT)))


@contextmanager
def in_turn(folder: Path, *cuts: Cut) -> Iterator[Run]:
    """A cut each run."""
    turns = itertools.cycle(cuts)
    steps = SlowSteps(folder)
    with NodeNetwork(2) as network, ThreadPoolExecutor(1) as clients:
        clients.submit(enter_namespace, network.namespace(0)).result()
        with steps.of_servers():
            servers = launch(network, folder)
        nodes = Nodes(network, servers, steps, clients.submit(answers, URL, **LONG).result())
        yield lambda: clients.submit(cut_once, nodes, next(turns)).result()


def launch(network: NodeNetwork, folder: Path) -> list[Server]:
    """Both nodes, once they serve."""
    write_new_keys(folder / "keys", 2)
    servers = network.launch_all(folder, RECALL, folder / "keys", *FLAGS, *RESTART, "--port", f"{PORT}")
    wait_until_ready(servers[0])
    if not servers[0].url:
        raise RuntimeError(f"the nodes did not start: {servers[0].last_line}")
    return servers


def cut_once(nodes: Nodes, cut: Cut) -> Result:
    """Cut while streams run, wait until both sides have ended by themselves, and heal."""
    nodes.steps.begin()
    streams, before = ask(URL, **LONG), nodes.processes()
    reaches(lambda: all(one.has_begun.is_set() for one in streams), LEFT_SECONDS)
    struck = time.monotonic()
    cut(nodes.network)
    reaches(lambda: not any(map(is_there, before)), LEFT_SECONDS)
    gone = time.monotonic()
    left = orphans(before) if any(map(is_there, before)) else 0
    for one in streams:
        one.join(LEFT_SECONDS)
    nodes.steps.end()
    for node in range(nodes.network.num_nodes):
        nodes.network.heal(node)
    healed = time.monotonic()
    if not reaches(is_ready, SERVING_SECONDS):
        raise TimeoutError(f"the nodes do not serve again: {nodes.servers[0].last_line}")
    recovered = time.monotonic()
    prefixes = [expected[: len(one.tokens)] for one, expected in zip(streams, nodes.right, strict=True)]
    return {
        "stream_closed_seconds": max(one.ended_at - struck for one in streams),
        "processes_gone_seconds": gone - struck,
        "recovery_seconds": recovered - healed,
        "failures": sum(one.is_alive() or not one.error for one in streams),
        **losses([*(one.tokens for one in streams), *answers(URL, **LONG)], [*prefixes, *nodes.right]),
        "leaked_pages": leaked_pages(URL),
        "orphans": left,
    }


def is_ready() -> bool:
    """Whether the nodes serve again."""
    with suppress(httpx.HTTPError):
        return httpx.get(f"{URL}/ready", timeout=SERVING_SECONDS).status_code == 200
    return False
