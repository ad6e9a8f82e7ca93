"""How long two nodes take from the command to ready, and from a fault to the end of all their processes.

    PYTHONPATH=tests python tests/bench/launch/launch_times.py --runs 20 --out tests/bench/results/launch-times.json

The nodes are network namespaces of one machine (root is needed), with CURVE keys and a rank on CPUs each: two replicas,
or one that spans them. A run counts in `wrong_ends` if an exit code is not the documented one, or if a node that failed
does not say the cause once, in its last line. Faults that the preflight finds are timed from the commands on.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil
from plait.bench.result_file import Row, commit, machine, versions
from plait.nodes.key_files import write_new_keys
from plait_testing.faulty_nodes import MEET_SECONDS, PHASES, cut_off_while, start_with_fault
from plait_testing.node_network import (
    NodeNetwork,
    interrupt,
    starve_a_rank,
    wait_for_all,
    workers_of,
)
from plait_testing.running_server import Server, wait_until_ready

MODEL = Path(__file__).resolve().parents[2] / "models" / "recall-mla"
FLAGS = ("--max-model-len", "1024", "--meet-timeout-seconds", "120")
LAYOUTS = {"replicas": ("--dp", "2"), "spanning": ("--tp", "2")}
LAUNCHERS_PORT, ENGINES_PORT = 7450, 7451
GOAL_SECONDS = 10.0
PATIENCE_SECONDS = 60.0
"""Whatever has not ended by then counts as a wrong end."""
Fault = Callable[[NodeNetwork, list[Server]], object]
"""Returns when it struck, by the monotonic clock, if that is not at once."""

FAULTS: dict[str, tuple[Fault, list[list[int]]]] = {
    "a rank of node 1 is killed": (lambda _, nodes: workers_of(nodes[1])[0].kill(), [[5, 5]]),
    "node 1 is cut off": (lambda network, _: network.cut_off(1), [[5, 5]]),
    "the head is cut off": (lambda network, _: network.cut_off(0), [[5, 5]]),
    "the launcher of node 1 is killed": (lambda _, nodes: nodes[1].process.kill(), [[5, -9]]),
    "the head's launcher is killed": (lambda _, nodes: nodes[0].process.kill(), [[-9, 5]]),
    "Ctrl-C on node 1": (lambda _, nodes: interrupt(nodes[1]), [[0, 0]]),
    "Ctrl-C on the head": (lambda _, nodes: interrupt(nodes[0]), [[0, 0]]),
    "a rank of node 1 has no memory": (
        lambda network, nodes: starve_a_rank(network, nodes, MODEL.name),
        [[3, 3], [5, 5]],
    ),
    "a rank of node 1 is frozen": (lambda _, nodes: workers_of(nodes[1])[0].suspend(), [[5, 5]]),
    "the launchers' link is half open": (lambda network, _: network.drop_port(1, LAUNCHERS_PORT), [[5, 5]]),
    "the engines' or ranks' link is half open": (lambda network, _: network.drop_port(1, ENGINES_PORT), [[5, 5]]),
    "the head's terminal is lost": (lambda _, nodes: nodes[0].process.send_signal(signal.SIGHUP), [[0, 0]]),
}
"""What is done, and the exit codes of the nodes. A rank without memory says so, or ends by a signal before it can."""
CUTS = {f"node 1 is cut off in phase {phase}": phase for phase in PHASES}
REFUSED: dict[str, list[list[int]]] = {
    "a wrong version": [[2, 2]],
    "another setting": [[2, 2]],
    "a shorter file": [[4, 4]],
    "a missing file": [[4, 4]],
    "no model": [[4, 4]],
    "a wrong key": [[5, 2]],
    "a clock off by an hour": [[3, 3]],
    "a port in use": [[2, 2]],
}
"""Exit codes of faults that the preflight finds; the head waits six seconds for a node with a wrong key."""
LEFT_OUT = {("spanning", name) for name in REFUSED}
"""The preflight is the same whatever the layout."""


def says_cause_last(node: Server) -> bool:
    """Whether a node that failed says why once, in its last line."""
    has_failed = node.process.returncode > 0
    return not has_failed or ("error (exit code" in node.last_line and node.errors.count("plait: ") == 1)


@dataclass(frozen=True)
class Run:
    """Seconds from the commands to ready, none if the nodes could not start; and from the fault to the last end."""

    ready: float | None
    end: float
    is_right: bool


def wait_for_ends(nodes: list[Server], left: list[psutil.Process], codes: list[list[int]]) -> bool:
    """Whether the nodes end as they must, and their processes with them."""
    try:
        ended = wait_for_all(nodes, PATIENCE_SECONDS)
    except subprocess.TimeoutExpired:
        ended = []
    _, running = psutil.wait_procs(left, timeout=PATIENCE_SECONDS)
    is_right = ended in codes and not running and all(map(says_cause_last, nodes))
    if not is_right:
        print(f"a wrong end, {ended}: {[one.last_line for one in nodes]}", flush=True)
    return is_right


def run_serving(name: str, layout: str) -> Run:
    """Nodes that serve, and a fault."""
    fault, codes = FAULTS[name]
    with tempfile.TemporaryDirectory() as folder, NodeNetwork(2) as network:
        keys = Path(folder) / "keys"
        write_new_keys(keys, 2)
        began = time.monotonic()
        nodes = network.launch_all(Path(folder), MODEL, keys, *FLAGS, *LAYOUTS[layout])
        wait_until_ready(nodes[0])
        ready = time.monotonic() - began
        left = [process for one in nodes for process in one.workers()]
        began = time.monotonic()
        struck = fault(network, nodes)
        began = struck if isinstance(struck, float) else began
        is_right = wait_for_ends(nodes, left, codes)
        return Run(ready, time.monotonic() - began, is_right)


def run_start(name: str, layout: str) -> Run:
    """Nodes that cannot start."""
    with tempfile.TemporaryDirectory() as folder, NodeNetwork(2) as network:
        keys = Path(folder) / "keys"
        write_new_keys(keys, 2)
        began = time.monotonic()
        if (phase := CUTS.get(name)) is None:
            nodes, codes = start_with_fault(name, network, Path(folder), MODEL, keys, *LAYOUTS[layout]), REFUSED[name]
        else:
            nodes, codes = cut_off_while(phase, network, Path(folder), MODEL, keys, *LAYOUTS[layout]), [[5, 5]]
            began = began if phase == "meet" else time.monotonic()
        is_right = wait_for_ends(nodes, [], codes)
        return Run(None, time.monotonic() - began, is_right)


def measure(layout: str, names: list[str], num_runs: int, num_jobs: int) -> Iterator[Row]:
    """Times of all runs of each fault."""
    starts: list[float] = []
    for fault in names:
        name = f"{layout}: {fault}"
        run = run_serving if fault in FAULTS else run_start
        with ThreadPoolExecutor(num_jobs) as jobs:
            runs = list(jobs.map(lambda _, fault=fault, run=run: run(fault, layout), range(num_runs)))
        starts += [one.ready for one in runs if one.ready is not None]
        ends = [one.end for one in runs]
        goal = GOAL_SECONDS + (MEET_SECONDS if CUTS.get(fault) == "meet" else 0)
        print(f"{name}: {num_runs} runs, median {statistics.median(ends):.1f} s, longest {max(ends):.1f} s", flush=True)
        yield Row(name, "runs", "runs", float(num_runs))
        yield Row(name, "end_p50", "seconds", statistics.median(ends))
        yield Row(name, "end_max", "seconds", max(ends), goal)
        yield Row(name, "wrong_ends", "runs", float(sum(not one.is_right for one in runs)), 0.0)
    if starts:
        name = f"{layout}: from the commands to ready"
        yield Row(name, "p50", "seconds", statistics.median(starts))
        yield Row(name, "max", "seconds", max(starts))


def write(out: Path, rows: list[Row]) -> None:
    """What is measured so far."""
    result = {
        "commit": commit(),
        "command": " ".join(["python", "tests/bench/launch/launch_times.py", *sys.argv[1:]]),
        "machine": machine(),
        "versions": versions(),
        "rows": msgspec.to_builtins(rows),
    }
    out.write_text(json.dumps(result, indent=1) + "\n")


def main() -> None:
    """Measure, and write the file."""
    all_faults = [*FAULTS, *CUTS, *REFUSED]
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--runs", type=int, default=20, help="runs of each fault")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--faults", nargs="+", choices=all_faults, default=all_faults, metavar="FAULT")
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS), metavar="LAYOUT")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    rows: list[Row] = []
    for layout in args.layouts:
        names = [name for name in args.faults if (layout, name) not in LEFT_OUT]
        for row in measure(layout, names, args.runs, args.jobs):
            rows.append(row)
            write(args.out, rows)


if __name__ == "__main__":
    main()
