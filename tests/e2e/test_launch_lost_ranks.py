"""Ranks of `plait launch` that are lost: what is noticed, and what starts again."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from plait_testing.held_steps import HeldSteps
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

MODEL = "recall-mla"
SPANNING = ("--tp", "2", "--max-model-len", "1024")
"""One replica with a rank on each node, whose engine is on the head."""
LAYOUTS = {"replicas": ("--dp", "2", *SPANNING), "spanning": SPANNING}
END_SECONDS = 60.0
"""Far below the deadline of a load, on any machine."""
LoseRank = Callable[[NodeNetwork, list[Server]], None]
IS_STOPPED = r"error \(exit code 5\): node 1 \(\S+\): rank 1 was stopped \(SIGSTOP, or a debugger\) for 2 s"


def first_rank(node: Server) -> psutil.Process:
    """The node's first rank, as soon as it is started."""
    while not (found := workers_of(node)):
        assert node.process.poll() is None, node.errors
        time.sleep(0.01)
    return found[0]


@pytest.mark.parametrize("phase", ["load", pytest.param("serve", marks=pytest.mark.slow)])
def test_a_stopped_rank_without_an_engine_beside_it_ends_both_nodes(
    phase: str, network: NodeNetwork, tmp_path: Path, check_models: Path, keys: Path
) -> None:
    """Its engine would wait for it until the deadline of the load, which is half an hour."""
    nodes = network.launch_all(tmp_path, check_models / MODEL, keys, *SPANNING)
    if phase == "serve":
        wait_until_ready(nodes[0])
    rank = first_rank(nodes[1])
    rank.suspend()
    assert wait_for_all(nodes, END_SECONDS) == [5, 5]
    assert not rank.is_running()
    for one in nodes:
        assert re.search(IS_STOPPED, one.last_line), one.last_line
    assert bool(nodes[0].url) == (phase == "serve")


def kill_rank(_: NodeNetwork, nodes: list[Server]) -> None:
    first_rank(nodes[1]).kill()


def kill_rank_of_slow_head(network: NodeNetwork, nodes: list[Server]) -> None:
    """Node 1 has ended and asks for the next meeting while the head still waits for the end of its own engine."""
    engine = next(process for process in nodes[0].workers() if "plait.nodes.engine_process" in process.cmdline())
    engine.suspend()
    kill_rank(network, nodes)


def starve_rank(network: NodeNetwork, nodes: list[Server]) -> None:
    """Take memory from a rank of node 1, and have it compute for the first time: later it may need no more."""
    exhaust_memory(first_rank(nodes[1]))
    node = 1 if has_engine(nodes[1]) else 0
    network.try_recall(node, door(nodes[0], node), MODEL)


@pytest.mark.parametrize(
    ("lose_rank", "layout"),
    [
        (starve_rank, "spanning"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (starve_rank, "replicas"),
                (kill_rank, "spanning"),
                (kill_rank, "replicas"),
                (kill_rank_of_slow_head, "spanning"),
            )
        ),
    ],
)
def test_a_rank_lost_while_serving_starts_all_again_as_far_as_the_budget_goes(
    lose_rank: LoseRank, layout: str, network: NodeNetwork, tmp_path: Path, check_models: Path, keys: Path
) -> None:
    file, combined = tmp_path / "restarts", tmp_path / "combined.log"
    flags = (*LAYOUTS[layout], "--restart", "group", "--restart-budget", "1", "--restart-file", str(file))
    nodes = network.launch_all(tmp_path, check_models / MODEL, keys, *flags, "--combined-log", str(combined))
    wait_until_ready(nodes[0])
    lose_and_wait(lose_rank, network, nodes)
    assert network.wrong_recall(0, door(nodes[0], 0, start=1), MODEL, 2, 512) == []
    lose_and_wait(kill_rank, network, nodes)
    assert wait_for_all(nodes, END_SECONDS) == [5, 5]
    assert file.read_text().count(".") == 2
    assert re.search(r"^\[(node 1|nodes 0-1) ranks? [0-3,-]+\] ", combined.read_text(), re.MULTILINE)


@pytest.mark.slow
def test_ranks_of_all_nodes_that_hang_in_a_step_write_where_before_they_end(
    network: NodeNetwork, tmp_path: Path, check_models: Path, keys: Path
) -> None:
    held = HeldSteps(tmp_path)
    with held.of_servers():
        nodes = network.launch_all(tmp_path, check_models / MODEL, keys, *SPANNING)
    wait_until_ready(nodes[0])
    held.begin(1)
    network.try_recall(0, nodes[0].url, MODEL)
    assert wait_for_all(nodes, END_SECONDS) == [5, 5]
    assert "no result in time" in nodes[1].last_line
    for node, one in enumerate(nodes):
        assert re.search(
            rf"^\[node {node}.* File .*sitecustomize.py\", line \d+ in launch_later", one.errors, re.MULTILINE
        )
    assert nodes[1].errors.count("in launch_later") == 1


@pytest.mark.slow
def test_nothing_starts_again_once_all_drain(
    network: NodeNetwork, tmp_path: Path, check_models: Path, keys: Path
) -> None:
    nodes = network.launch_all(tmp_path, check_models / MODEL, keys, *SPANNING, "--restart", "group")
    wait_until_ready(nodes[0])
    rank = first_rank(nodes[1])
    rank.suspend()  # it cannot end by itself
    interrupt(nodes[0])
    nodes[0].read_line("Draining all nodes")
    rank.kill()
    assert wait_for_all(nodes, END_SECONDS) == [5, 5]


def lose_and_wait(lose_rank: LoseRank, network: NodeNetwork, nodes: list[Server]) -> None:
    """Until all engines and ranks of before have ended."""
    before = [process for one in nodes for process in one.workers()]
    lose_rank(network, nodes)
    _, left = psutil.wait_procs(before, timeout=END_SECONDS)
    assert left == []
