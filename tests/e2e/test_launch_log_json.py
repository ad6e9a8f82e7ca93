"""`plait launch --log-json`: each line that a node writes on standard error is an object with its node and rank."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from plait.nodes.head import LOADED
from plait.nodes.key_files import write_new_keys
from plait_testing.json_log import read_json_lines
from plait_testing.node_network import NodeNetwork, reason_without_namespaces, wait_for_all, workers_of
from plait_testing.running_server import START_SECONDS, Server, spawn_server, wait_until_ready

LAYOUTS = {"replicas": ("--dp", "2"), "spanning": ("--tp", "2")}
"""Two ranks: with an engine on each node, or with the head's alone."""
STACK = "most recent call first"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_line_of_all_nodes_is_an_object_with_its_node_and_rank(
    layout: str, tmp_path: Path, check_models: Path
) -> None:
    if reason := reason_without_namespaces():
        pytest.skip(reason)
    write_new_keys(tmp_path / "keys", 2)
    combined = tmp_path / "combined.log"
    flags = (*LAYOUTS[layout], "--max-model-len", "1024", "--log-json", "--combined-log", str(combined))
    with NodeNetwork(2) as network:
        nodes = network.launch_all(tmp_path, check_models / "recall-mla", tmp_path / "keys", *flags)
        wait_until_ready(nodes[0])
        assert nodes[0].url, nodes[0].errors
        assert LOADED in nodes[0].lines, "standard output is text"
        [rank] = workers_of(nodes[1])
        os.kill(rank.pid, signal.SIGUSR2)  # stacks: lines of no logger
        wait_until_said(nodes[0], STACK)
        rank.kill()
        assert wait_for_all(nodes, START_SECONDS) == [5, 5]
    of_head, of_other = (read_json_lines(one.errors) for one in nodes)
    assert {(line["node"], line.get("rank")) for line in of_head} >= {(0, None), (0, 0), (1, 1)}
    assert {line["node"] for line in of_other} == {1}
    for lines in (of_head, of_other):
        assert {line["rank"] for line in lines if STACK in line["message"]} == {1}
        assert all(line["source"] == f"rank {line['rank']}" for line in lines if line["source"].startswith("rank"))
        *_, last = lines
        assert (last["level"], last["source"]) == ("ERROR", "plait")
        assert last["message"].startswith("plait: rank lost error (exit code 5): node 1 (")
        assert "was killed by SIGKILL" in last["message"]
        assert sum("plait: rank lost error" in line["message"] for line in lines) == 1
    assert [of_head[-1]["node"], of_other[-1]["node"]] == [0, 1]
    assert read_json_lines(combined.read_text()) == of_head[:-1]


def wait_until_said(node: Server, text: str) -> None:
    """Until its standard error has the text."""
    while text not in node.errors:
        assert node.process.poll() is None, node.errors
        time.sleep(0.05)


def test_the_last_line_of_a_launch_that_cannot_start_is_an_object(tmp_path: Path, check_models: Path) -> None:
    words = ("launch", str(check_models / "recall-mla"), "--nnodes", "2", "--log-json")
    node = spawn_server(tmp_path / "log", "-m", "plait.cli", *words)
    assert node.wait() == 2
    [line] = read_json_lines(node.errors)
    assert (line["level"], line["source"]) == ("ERROR", "plait")
    assert "--node-rank" in line["message"]
