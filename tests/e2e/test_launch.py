"""`plait launch` on two nodes: namespaces with a network of their own, keys, the real commands, ranks on CPUs."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from plait.nodes.environment import HEAD_PORT
from plait.nodes.head import LOADED
from plait.nodes.key_files import write_new_keys
from plait_testing.faulty_nodes import MEET_SECONDS, PHASES, cut_off_while, start_with_fault
from plait_testing.node_network import (
    NodeNetwork,
    door,
    interrupt,
    reason_without_namespaces,
    starve_a_rank,
    wait_for_all,
    workers_of,
)
from plait_testing.recording import Record
from plait_testing.running_server import Server, spawn_server, wait_until_ready

END_SECONDS = 10.0
"""From the first failure to the end of all processes on all nodes, where the machine has nothing else to do."""
BUSY_END_SECONDS = 60.0
"""The same on any machine."""
OF_NODE_1 = re.compile(r"^\[(node 1|nodes 0-1) ranks? [0-3,-]+\] ", re.MULTILINE)
"""A line of ranks of node 1, alone or with those of node 0, if they said it at the same time."""
LAYOUT = ("--tp", "2", "--dp", "2")
"""A replica on each node."""
SPANNING = ("--tp", "2")
"""One replica with a rank on each node."""
Sized = Callable[[int, int], int]
both_layouts = pytest.mark.parametrize("layout", [LAYOUT, SPANNING], ids=["replicas", "spanning"])


def begin(
    network: NodeNetwork, folder: Path, check_models: Path, keys: Path, *flags: str, layout: tuple[str, ...] = LAYOUT
) -> list[Server]:
    """Two nodes of recall-mla that are ready."""
    nodes = network.launch_all(folder, check_models / "recall-mla", keys, *layout, *flags)
    wait_until_ready(nodes[0])
    assert nodes[0].url, nodes[0].errors
    return nodes


def processes_of(nodes: list[Server]) -> list[psutil.Process]:
    """All of them, launchers, engines and ranks."""
    return [process for one in nodes for process in (psutil.Process(one.process.pid), *one.workers())]


def assert_no_core_files(nodes: list[Server]) -> None:
    """Of engines and ranks, whatever the limit of whoever started the launcher."""
    assert {process.rlimit(psutil.RLIMIT_CORE) for one in nodes for process in one.workers()} == {(0, 0)}


def assert_all_gone(processes: list[psutil.Process], seconds: float = END_SECONDS) -> None:
    _, left = psutil.wait_procs(processes, timeout=seconds)
    assert left == []


@pytest.mark.acceptance("cpu")
def test_two_nodes_answer_through_the_heads_door_and_a_killed_rank_ends_both(
    network: NodeNetwork, tmp_path: Path, check_models: Path, keys: Path, sized: Sized, record: Record
) -> None:
    began = time.monotonic()
    nodes = begin(network, tmp_path, check_models, keys)
    record("launch: 2 nodes, TP 2 on each as DP 2", "ready", "seconds", time.monotonic() - began)
    assert [line.split()[3:] for line in nodes[0].lines if line.startswith(("  0 ", "  1 "))] == [["ok"] * 13] * 2
    assert LOADED in nodes[0].lines
    assert network.wrong_recall(0, nodes[0].url, "recall-mla", sized(4, 100), sized(512, 2048)) == []
    everything = processes_of(nodes)
    assert len(everything) == 2 * 4
    assert_no_core_files(nodes)
    assert [network.open_ports(node) for node in (0, 1)] == [{HEAD_PORT, HEAD_PORT + 1}, set()]
    workers_of(nodes[1])[0].kill()
    assert wait_for_all(nodes, BUSY_END_SECONDS) == [5, 5]
    assert_all_gone(everything, BUSY_END_SECONDS)
    for one in nodes:
        assert "exit code 5): node 1 (" in one.last_line
        assert "was killed by SIGKILL" in one.last_line
        assert one.errors.count("plait: rank lost error") == 1
    assert OF_NODE_1.search(nodes[0].errors)


def test_a_replica_with_ranks_on_two_nodes_answers_and_a_killed_rank_ends_both(
    network: NodeNetwork, tmp_path: Path, check_models: Path, keys: Path
) -> None:
    """Tensor parallelism across nodes: one engine on the head, whose other rank connects over TCP with its key."""
    nodes = begin(network, tmp_path, check_models, keys, layout=SPANNING)
    assert any(line.startswith("warning: replica 0 has ranks on several nodes") for line in nodes[0].lines)
    assert any(line.startswith("All-reduce of 4 MiB between the nodes (gloo): ") for line in nodes[0].lines)
    assert len(workers_of(nodes[0])) == len(workers_of(nodes[1])) == 1
    assert network.wrong_recall(0, nodes[0].url, "recall-mla", 4, 512) == []
    assert_no_core_files(nodes)
    of_ranks = network.open_ports(0) - {HEAD_PORT, HEAD_PORT + 1}, network.open_ports(1)
    assert [len(ports) for ports in of_ranks] == [1, 1], "gloo's, of a rank on each node"
    everything = processes_of(nodes)
    workers_of(nodes[1])[0].kill()
    assert wait_for_all(nodes, BUSY_END_SECONDS) == [5, 5]
    assert_all_gone(everything, BUSY_END_SECONDS)
    for one in nodes:
        assert re.search(r"exit code 5\): node 1 \(\S+\): rank 1 was killed by SIGKILL", one.last_line), one.last_line


def test_ctrl_c_ends_a_node_that_waits_for_the_head(tmp_path: Path, check_models: Path, keys: Path) -> None:
    place = ("--nnodes", "2", "--node-rank", "1", "--head", "127.0.0.1:1", "--keys", str(keys), "--dp", "2")
    model = str(check_models / "recall-mla")
    waiting = spawn_server(tmp_path / "log", "-m", "plait.cli", "launch", model, *place)
    try:
        assert "as node 1" in waiting.read_line("Joining node 0 at 127.0.0.1:1")
        assert waiting.stop(signal.SIGINT) == 0
    finally:
        waiting.kill()


def test_an_address_that_this_machine_has_not_is_named(tmp_path: Path, check_models: Path, keys: Path) -> None:
    place = ("--nnodes", "2", "--node-rank", "1", "--head", "127.0.0.1:1", "--keys", str(keys), "--dp", "2")
    words = ("launch", str(check_models / "recall-mla"), *place, "--node-address", "192.0.2.1")
    node = spawn_server(tmp_path / "log", "-m", "plait.cli", *words)
    assert node.wait() == 2
    assert "node 1 cannot listen at 192.0.2.1: Cannot assign" in node.last_line


@pytest.mark.acceptance("cpu")
@pytest.mark.parametrize("num_nodes", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_nodes_that_share_experts_answer_through_all_doors_at_once(
    num_nodes: int, tmp_path: Path, check_models: Path, sized: Sized, record: Record
) -> None:
    """DP attention: the experts of recall-mla are divided among the ranks of all nodes, and every node has rows."""
    if reason := reason_without_namespaces():
        pytest.skip(reason)
    write_new_keys(tmp_path / "keys", num_nodes)
    context = sized(512, 2048)
    flags = ("--dp", str(num_nodes), "--dp-attention", "--max-model-len", str(context + 512))
    with NodeNetwork(num_nodes) as network:
        began = time.monotonic()
        nodes = network.launch_all(tmp_path, check_models / "recall-mla", tmp_path / "keys", *flags)
        wait_until_ready(nodes[0])
        assert nodes[0].url, nodes[0].errors
        record(f"launch: {num_nodes} nodes, DP attention", "ready", "seconds", time.monotonic() - began)
        everything = processes_of(nodes)
        nums = [sized(4, 100), *[sized(1, 20)] * (num_nodes - 1)]
        with ThreadPoolExecutor(num_nodes) as pool:
            asked = [
                pool.submit(network.wrong_recall, node, door(nodes[0], node), "recall-mla", num, context)
                for node, num in enumerate(nums)
            ]
            assert [wrong for one in asked for wrong in one.result()] == []
        interrupt(nodes[-1])
        assert wait_for_all(nodes, BUSY_END_SECONDS) == [0] * num_nodes
        assert_all_gone(everything, BUSY_END_SECONDS)


@pytest.mark.slow
def test_a_replica_may_have_no_rank_beside_its_engine(tmp_path: Path, check_models: Path) -> None:
    """Replica 0 has ranks on nodes 0 and 1, replica 1 on nodes 2 and 3."""
    if reason := reason_without_namespaces():
        pytest.skip(reason)
    write_new_keys(tmp_path / "keys", 4)
    flags = ("--tp", "2", "--dp", "2", "--max-model-len", "1024")
    with NodeNetwork(4) as network:
        nodes = network.launch_all(tmp_path, check_models / "recall-mla", tmp_path / "keys", *flags)
        wait_until_ready(nodes[0])
        assert nodes[0].url, nodes[0].errors
        assert [len(workers_of(one)) for one in nodes] == [1] * 4
        assert network.wrong_recall(0, nodes[0].url, "recall-mla", 8, 512) == []
        interrupt(nodes[2])
        assert wait_for_all(nodes, END_SECONDS) == [0] * 4
        steps = re.findall(r"drained: Totals\(num_steps=(\d+)", nodes[0].errors)
        assert steps, nodes[0].errors
        assert min(map(int, steps)) > 2, "both replicas computed more than the warm-up"


@pytest.mark.slow
def test_nodes_meet_over_ipv6(tmp_path: Path, check_models: Path, keys: Path) -> None:
    if reason := reason_without_namespaces():
        pytest.skip(reason)
    with NodeNetwork(2, has_ipv6=True) as network:
        nodes = begin(network, tmp_path, check_models, keys, "--dp-attention", "--max-model-len", "1024")
        assert "at fd77::2: this machine's address on the way to fd77::1" in "".join(nodes[0].lines)
        assert network.wrong_recall(0, nodes[0].url, "recall-mla", 2, 512) == []
        interrupt(nodes[0])
        assert wait_for_all(nodes, END_SECONDS) == [0, 0]


@pytest.mark.slow
@both_layouts
@pytest.mark.parametrize("asked", [0, 1])
def test_ctrl_c_on_any_node_drains_all(
    asked: int, network: NodeNetwork, tmp_path: Path, check_models: Path, keys: Path, layout: tuple[str, ...]
) -> None:
    nodes = begin(network, tmp_path, check_models, keys, layout=layout)
    everything = processes_of(nodes)
    interrupt(nodes[asked])
    assert wait_for_all(nodes, END_SECONDS) == [0, 0]
    assert_all_gone(everything)


@pytest.mark.slow
@both_layouts
@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("how", ["terminal", "killed"])
def test_a_lost_launcher_leaves_nothing_running(
    lost: int, how: str, network: NodeNetwork, tmp_path: Path, check_models: Path, keys: Path, layout: tuple[str, ...]
) -> None:
    nodes = begin(network, tmp_path, check_models, keys, layout=layout)
    everything = processes_of(nodes)
    nodes[lost].process.send_signal(signal.SIGHUP if how == "terminal" else signal.SIGKILL)
    wait_for_all(nodes, END_SECONDS)
    assert_all_gone(everything)
    if how == "killed":
        other = nodes[1 - lost]
        assert other.process.returncode == 5
        assert f"node {lost} (" in other.last_line


@pytest.mark.slow
@both_layouts
@pytest.mark.parametrize("cut", [0, 1])
def test_a_node_that_is_cut_off_ends_both_and_each_names_the_other(
    cut: int, network: NodeNetwork, tmp_path: Path, check_models: Path, keys: Path, layout: tuple[str, ...]
) -> None:
    nodes = begin(network, tmp_path, check_models, keys, layout=layout)
    everything = processes_of(nodes)
    network.cut_off(cut)
    assert wait_for_all(nodes, END_SECONDS) == [5, 5]
    assert_all_gone(everything)
    assert "node 1 (" in nodes[0].last_line
    assert "no word" in nodes[0].last_line
    assert "node 0 (" in nodes[1].last_line
    assert "no word" in nodes[1].last_line


@pytest.mark.slow
@both_layouts
@pytest.mark.parametrize("cut_while", PHASES)
def test_a_node_that_is_cut_off_before_all_are_ready_ends_both(
    cut_while: str, network: NodeNetwork, tmp_path: Path, check_models: Path, keys: Path, layout: tuple[str, ...]
) -> None:
    nodes = cut_off_while(cut_while, network, tmp_path, check_models / "recall-mla", keys, *layout)
    assert wait_for_all(nodes, MEET_SECONDS + END_SECONDS) == [5, 5]
    ranks = "ranks 2 to 3" if layout is LAYOUT else "rank 1"
    wanted = (
        f"phase meet: node 1 ({ranks}) missing after {MEET_SECONDS} s"
        if cut_while == "meet"
        else "no word from 10.77.0.2"
    )
    assert wanted in nodes[0].last_line
    assert "node 0" in nodes[1].last_line


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "codes", "said"),
    [
        ("a wrong version", [2, 2], "version: Plait 9.9.9, node 0 has"),
        ("another setting", [2, 2], "settings: --max-seqs is 8, on node 0 the default"),
        ("a shorter file", [4, 4], "model.safetensors in"),
        ("a missing file", [4, 4], "lacks model.safetensors, which node 0 has"),
        ("no model", [4, 4], "there is no file or folder"),
        ("a wrong key", [5, 2], "key"),
        ("a clock off by an hour", [3, 3], "clock: the clock is 3,600 s ahead of node 0's"),
        ("a port in use", [2, 2], "ports: port 8000 on 127.0.0.1 is in use"),
    ],
)
def test_a_fault_of_a_node_ends_all_before_anything_loads(
    fault: str, codes: list[int], said: str, network: NodeNetwork, tmp_path: Path, check_models: Path, keys: Path
) -> None:
    began = time.monotonic()
    nodes = start_with_fault(fault, network, tmp_path, check_models / "recall-mla", keys, *LAYOUT)
    assert wait_for_all(nodes, 20 + END_SECONDS) == codes, time.monotonic() - began
    assert all(said in one.last_line for one in nodes), [one.last_line for one in nodes]
    assert not any("Loading" in one.errors for one in nodes)


@pytest.mark.slow
def test_an_all_reduce_that_does_not_get_through_is_found_before_anything_loads(
    network: NodeNetwork, tmp_path: Path, check_models: Path, keys: Path
) -> None:
    model, wrong = check_models / "recall-mla", {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    nodes = [
        network.launch(node, tmp_path / f"node-{node}.log", model, *network.place(node, keys), *SPANNING, **wrong)
        for node in (0, 1)
    ]
    assert wait_for_all(nodes, 60 + END_SECONDS) == [5, 5]
    assert all("reduce: " in one.last_line and "GLOO_SOCKET_IFNAME" in one.last_line for one in nodes)
    assert not any("Loading" in one.errors for one in nodes)


@pytest.mark.slow
def test_a_second_node_with_one_rank_is_named(
    network: NodeNetwork, tmp_path: Path, check_models: Path, keys: Path
) -> None:
    model = check_models / "recall-mla"
    twins = [network.launch(1, tmp_path / f"twin-{n}.log", model, *network.place(1, keys), *LAYOUT) for n in (0, 1)]
    head = network.launch(0, tmp_path / "head.log", model, *network.place(0, keys), *LAYOUT)
    assert wait_for_all([head, *twins], 20 + END_SECONDS) == [2, 2, 2]
    assert "two nodes say that they are node 1" in head.last_line


@pytest.mark.slow
def test_a_second_node_with_one_rank_does_not_end_what_serves(
    network: NodeNetwork, tmp_path: Path, check_models: Path, keys: Path
) -> None:
    nodes = begin(network, tmp_path, check_models, keys)
    twin = network.launch(1, tmp_path / "twin.log", check_models / "recall-mla", *network.place(1, keys), *LAYOUT)
    assert wait_for_all([twin], BUSY_END_SECONDS) == [2]
    assert "two nodes say that they are node 1" in twin.last_line
    assert network.wrong_recall(0, nodes[0].url, "recall-mla", 1, 512) == []
    interrupt(nodes[0])
    assert wait_for_all(nodes, BUSY_END_SECONDS) == [0, 0]
    assert "[node 0] refused: two nodes say that they are node 1" in nodes[0].errors


@pytest.mark.slow
def test_a_frozen_rank_ends_both_nodes(network: NodeNetwork, tmp_path: Path, check_models: Path, keys: Path) -> None:
    """Its peer notices in a step, after the seconds that a rank may be late."""
    nodes = begin(network, tmp_path, check_models, keys)
    everything = processes_of(nodes)
    workers_of(nodes[1])[0].suspend()
    began = time.monotonic()
    network.try_recall(0, nodes[0].url, "recall-mla")
    assert wait_for_all(nodes, 5 + END_SECONDS) == [5, 5], time.monotonic() - began
    assert_all_gone(everything)
    assert "node 1 (" in nodes[0].last_line


@pytest.mark.slow
@both_layouts
def test_a_rank_without_memory_ends_both_nodes(
    network: NodeNetwork, tmp_path: Path, check_models: Path, keys: Path, layout: tuple[str, ...]
) -> None:
    nodes = begin(network, tmp_path, check_models, keys, layout=layout)
    everything = processes_of(nodes)
    starve_a_rank(network, nodes, "recall-mla")
    codes = wait_for_all(nodes, END_SECONDS)
    assert_all_gone(everything)
    for one in nodes:
        assert re.search(r"\): node 1 \(\S+\): .*(out of memory|killed by SIG)", one.last_line), one.last_line
    # Whatever asks first gets no memory. Only a stack that cannot grow ends a process without a word.
    is_silent = "killed by SIGSEGV" in nodes[0].last_line
    assert codes == ([5, 5] if is_silent else [3, 3]), nodes[0].last_line


@pytest.mark.slow
@both_layouts
@pytest.mark.parametrize("port", [7450, 7451], ids=["of launchers", "of engines or ranks"])
def test_a_half_open_link_ends_both_nodes(
    port: int, network: NodeNetwork, tmp_path: Path, check_models: Path, keys: Path, layout: tuple[str, ...]
) -> None:
    nodes = begin(network, tmp_path, check_models, keys, layout=layout)
    everything = processes_of(nodes)
    network.drop_port(1, port)
    assert wait_for_all(nodes, END_SECONDS) == [5, 5]
    assert_all_gone(everything)
    assert [one.errors.count("plait: rank lost error") for one in nodes] == [1, 1]


@pytest.mark.slow
def test_a_full_disk_for_logs_ends_nothing(
    network: NodeNetwork, tmp_path: Path, check_models: Path, keys: Path
) -> None:
    """Standard error of all nodes, and the combined log."""
    full, model = Path("/dev/full"), check_models / "recall-mla"
    flags = ("--combined-log", str(full))
    nodes = [network.launch(node, full, model, *network.place(node, keys), *LAYOUT, *flags) for node in (0, 1)]
    wait_until_ready(nodes[0])
    assert network.wrong_recall(0, nodes[0].url, "recall-mla", 2, 512) == []
    interrupt(nodes[0])
    assert wait_for_all(nodes, END_SECONDS) == [0, 0]


@pytest.mark.slow
def test_a_new_head_finds_a_node_that_waits_for_it(
    network: NodeNetwork, tmp_path: Path, check_models: Path, keys: Path
) -> None:
    nodes = begin(network, tmp_path, check_models, keys, "--restart", "group")
    nodes[0].process.kill()
    flags = (*LAYOUT, "--restart", "group")
    again = network.launch(0, tmp_path / "again.log", check_models / "recall-mla", *network.place(0, keys), *flags)
    wait_until_ready(again)
    assert network.wrong_recall(0, again.url, "recall-mla", 2, 512) == []
    interrupt(again)
    assert wait_for_all([again, nodes[1]], END_SECONDS) == [0, 0]


@pytest.mark.slow
def test_a_node_whose_launcher_starts_again_at_once_is_no_second_node(
    network: NodeNetwork, tmp_path: Path, check_models: Path, keys: Path
) -> None:
    """It asks the head before the head has missed the launcher before it."""
    nodes = begin(network, tmp_path, check_models, keys, "--restart", "group")
    nodes[1].process.kill()
    flags = (*LAYOUT, "--restart", "group")
    again = network.launch(1, tmp_path / "again.log", check_models / "recall-mla", *network.place(1, keys), *flags)
    assert network.wrong_recall(0, door(nodes[0], 0, start=1), "recall-mla", 2, 512) == []
    interrupt(again)
    assert wait_for_all([nodes[0], again], END_SECONDS) == [0, 0]
