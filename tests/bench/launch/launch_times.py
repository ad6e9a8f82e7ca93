"""How long two nodes take from the command to ready, and from a fault to the end of all their processes.

    PYTHONPATH=tests python tests/bench/launch/launch_times.py --runs 20 --out tests/bench/results/launch-times.json

The nodes are network namespaces of one machine (root is needed), with CURVE keys and a rank on CPUs each: two replicas,
or one that spans them. A run counts in `wrong_ends` if an exit code is not the documented one, or if a node that failed
does not say the cause once, in its last line.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import psutil
from plait.bench.result_file import Row, commit, machine, versions
from plait.nodes.key_files import write_new_keys
from plait_testing.node_network import (
    NodeNetwork,
    door,
    exhaust_memory,
    has_engine,
    interrupt,
    wait_for_all,
    workers_of,
)
from plait_testing.running_server import Server, wait_until_ready

MODEL = Path(__file__).resolve().parents[2] / "models" / "recall-mla"
FLAGS = ("--max-model-len", "1024", "--meet-timeout-seconds", "120")
LAYOUTS = {"replicas": ("--dp", "2"), "spanning": ("--tp", "2")}
LAUNCHERS_PORT, ENGINES_PORT = 7450, 7451
GOAL_SECONDS = 10.0
Fault = Callable[[NodeNetwork, list[Server]], object]

FROZEN = "a rank of node 1 is frozen"
"""Noticed by its node's launcher if its engine is on another host; else by its step's deadline, after over a minute."""
FAULTS: dict[str, tuple[Fault, list[list[int]]]] = {
    "a rank of node 1 is killed": (lambda _, nodes: workers_of(nodes[1])[0].kill(), [[5, 5]]),
    "node 1 is cut off": (lambda network, _: network.cut_off(1), [[5, 5]]),
    "the head is cut off": (lambda network, _: network.cut_off(0), [[5, 5]]),
    "the launcher of node 1 is killed": (lambda _, nodes: nodes[1].process.kill(), [[5, -9]]),
    "the head's launcher is killed": (lambda _, nodes: nodes[0].process.kill(), [[-9, 5]]),
    "Ctrl-C on node 1": (lambda _, nodes: interrupt(nodes[1]), [[0, 0]]),
    "Ctrl-C on the head": (lambda _, nodes: interrupt(nodes[0]), [[0, 0]]),
    "a rank of node 1 has no memory": (lambda network, nodes: starve(network, nodes), [[3, 3], [5, 5]]),
    FROZEN: (lambda _, nodes: workers_of(nodes[1])[0].suspend(), [[5, 5]]),
    "the launchers' link is half open": (lambda network, _: network.drop_port(1, LAUNCHERS_PORT), [[5, 5]]),
    "the engines' or ranks' link is half open": (lambda network, _: network.drop_port(1, ENGINES_PORT), [[5, 5]]),
    "the head's terminal is lost": (lambda _, nodes: nodes[0].process.send_signal(signal.SIGHUP), [[0, 0]]),
}
"""What is done, and the exit codes of the nodes. A rank without memory says so, or ends by a signal before it can."""


def starve(network: NodeNetwork, nodes: list[Server]) -> None:
    """Take memory from a rank of node 1, and have it compute."""
    exhaust_memory(workers_of(nodes[1])[0])
    node = 1 if has_engine(nodes[1]) else 0
    network.try_recall(node, door(nodes[0], node), MODEL.name)


def says_cause_last(node: Server) -> bool:
    """Whether a node that failed says why once, in its last line."""
    has_failed = node.process.returncode > 0
    return not has_failed or ("error (exit code" in node.last_line and node.errors.count("plait: ") == 1)


def run_once(fault: Fault, codes: list[list[int]], layout: str) -> tuple[float, float, bool]:
    """Seconds to ready, seconds from the fault to the end of the last process, and whether the ends are right."""
    with tempfile.TemporaryDirectory() as folder, NodeNetwork(2) as network:
        keys = Path(folder) / "keys"
        write_new_keys(keys, 2)
        began = time.monotonic()
        nodes = network.launch_all(Path(folder), MODEL, keys, *FLAGS, *LAYOUTS[layout])
        wait_until_ready(nodes[0])
        ready = time.monotonic() - began
        left = [process for one in nodes for process in one.workers()]
        began = time.monotonic()
        fault(network, nodes)
        ended = wait_for_all(nodes, 60)
        _, running = psutil.wait_procs(left, timeout=60)
        seconds = time.monotonic() - began
        is_right = ended in codes and not running and all(map(says_cause_last, nodes))
        if not is_right:
            print(f"a wrong end, {ended}: {[one.last_line for one in nodes]}", flush=True)
        return ready, seconds, is_right


def measure(layout: str, names: list[str], num_runs: int) -> Iterator[Row]:
    """Times of all runs of each fault."""
    starts: list[float] = []
    for fault in names:
        name = f"{layout}: {fault}"
        runs = [run_once(*FAULTS[fault], layout) for _ in range(num_runs)]
        starts += [ready for ready, _, _ in runs]
        ends = [end for _, end, _ in runs]
        print(f"{name}: {num_runs} runs, median {statistics.median(ends):.1f} s, longest {max(ends):.1f} s", flush=True)
        yield Row(name, "runs", "runs", float(num_runs))
        yield Row(name, "end_p50", "seconds", statistics.median(ends))
        yield Row(name, "end_max", "seconds", max(ends), GOAL_SECONDS)
        yield Row(name, "wrong_ends", "runs", float(sum(not is_right for _, _, is_right in runs)), 0.0)
    name = f"{layout}: from the commands to ready"
    yield Row(name, "p50", "seconds", statistics.median(starts))
    yield Row(name, "max", "seconds", max(starts))


def main() -> None:
    """Measure, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--runs", type=int, default=20, help="runs of each fault")
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=list(FAULTS), metavar="FAULT")
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS), metavar="LAYOUT")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    measured = {
        layout: [name for name in args.faults if (layout, name) != ("replicas", FROZEN)] for layout in args.layouts
    }
    rows = [row for layout, names in measured.items() for row in measure(layout, names, args.runs)]
    result = {
        "commit": commit(),
        "command": " ".join(["python", "tests/bench/launch/launch_times.py", *sys.argv[1:]]),
        "machine": machine(),
        "versions": versions(),
        "rows": msgspec.to_builtins(rows),
    }
    args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
