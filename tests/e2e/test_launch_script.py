"""`deploy/launch-multinode.sh`, with a stand-in for ssh that runs its command on a node in a namespace."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from plait.nodes.key_files import write_new_keys
from plait.nodes.settings import NodeSettings
from plait.nodes.signals import SILENCE_SECONDS
from plait_testing.budgets import ROOT
from plait_testing.node_network import NodeNetwork, reason_without_namespaces
from plait_testing.running_server import Server, wait_until_ready

MEET_SECONDS = NodeSettings().meet_timeout_seconds
SCRIPT = ROOT / "deploy" / "launch-multinode.sh"
SSH = """#!/bin/bash
while [ "$1" = -o ]; do shift 2; done
case $1 in user@{addresses[0]}) name={names[0]} ;; {addresses[1]}) name={names[1]} ;; *) exit 255 ;; esac
cd {home} && exec setsid ip netns exec $name bash -c "$2"
"""
PLAIT = '#!/bin/bash\nexec {python} -m plait.cli "$@"\n'
WITHOUT_NODE_1 = """#!/bin/bash
[[ $* == *--node-rank\\ 1* ]] && echo "plait: no such program here" >&2 && exit 127
exec {python} -m plait.cli "$@"
"""


@pytest.fixture
def network() -> Iterator[NodeNetwork]:
    if reason := reason_without_namespaces():
        pytest.skip(reason)
    with NodeNetwork(2) as made:
        yield made


def write_program(file: Path, text: str) -> Path:
    file.parent.mkdir(exist_ok=True)
    file.write_text(text)
    file.chmod(0o755)
    return file


def start(network: NodeNetwork, folder: Path, model: Path) -> Server:
    """The script with two hosts, ready."""
    one = spawn(network, folder, model, PLAIT)
    wait_until_ready(one)
    assert one.url, one.errors
    return one


def spawn(network: NodeNetwork, folder: Path, model: Path, program: str) -> Server:
    """The script with two hosts, and what `plait` is on each."""
    (folder / "home").mkdir()
    names, addresses = ([of(node) for node in (0, 1)] for of in (network.namespace, network.address))
    ssh = write_program(folder / "bin" / "ssh", SSH.format(names=names, addresses=addresses, home=folder / "home"))
    plait = write_program(folder / "bin" / "plait", program.format(python=sys.executable))
    words = ["--keys", str(folder / "keys"), "--plait", str(plait), f"user@{addresses[0]}", addresses[1]]
    words += ["--", str(model), "--dp", "2", "--port", "0", "--threads", "1", "--max-model-len", "1024"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [str(SCRIPT), *words],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            bufsize=1,
            start_new_session=True,
            env=os.environ | {"PATH": f"{ssh.parent}:{os.environ['PATH']}"},
        )
    return Server(process, folder / "log")


@pytest.mark.slow
@pytest.mark.parametrize("how", ["ctrl-c", "two ctrl-c", "killed", "a connection is lost"])
def test_hosts_behind_ssh_serve_and_nothing_is_left_running(
    how: str, network: NodeNetwork, tmp_path: Path, check_models: Path
) -> None:
    script = start(network, tmp_path, check_models / "recall-gqa")
    everything = script.workers()
    assert network.wrong_recall(0, script.url, "recall-gqa", 2, 512) == []
    assert {file.name: file.stat().st_mode & 0o777 for file in (tmp_path / "home" / ".plait-keys").iterdir()} == {
        name: 0o600 for name in ("public.keys", "node-0.key", "node-1.key")
    }
    match how:
        case "killed":
            script.process.kill()
        case "a connection is lost":
            # The stand-in has become the launcher: what a lost connection closes is its standard input.
            closed = next(one for one in everything if "--node-rank" in one.cmdline())
            closed.send_signal(signal.SIGHUP)
        case _:
            for _ in range(1 if how == "ctrl-c" else 2):
                os.killpg(script.process.pid, signal.SIGINT)
    _, left = psutil.wait_procs(everything, timeout=15)
    assert left == []
    code = script.wait()
    assert code == {"ctrl-c": 0, "two ctrl-c": 0, "killed": -9}.get(how, code)


@pytest.mark.slow
def test_hosts_stop_behind_connections_that_are_cut_without_a_word(
    network: NodeNetwork, tmp_path: Path, check_models: Path
) -> None:
    """The script is suspended, no signs of life come from it, and the hosts' standard input stays open."""
    script = start(network, tmp_path, check_models / "recall-gqa")
    everything = [psutil.Process(script.process.pid), *script.workers()]
    own = [one for one in everything if any(word.endswith(SCRIPT.name) for word in one.cmdline())]
    for one in own:
        one.suspend()
    at_hosts = [one for one in everything if one not in own]
    deadline = time.monotonic() + SILENCE_SECONDS + 15
    # Nobody reaps the children of what is suspended.
    while any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in at_hosts):
        assert time.monotonic() < deadline, at_hosts
        time.sleep(0.1)
    for one in own:
        one.kill()


@pytest.mark.slow
def test_hosts_do_not_wait_for_one_that_has_ended_alone(
    network: NodeNetwork, tmp_path: Path, check_models: Path
) -> None:
    began = time.monotonic()
    script = spawn(network, tmp_path, check_models / "recall-gqa", WITHOUT_NODE_1)
    assert script.wait() == 127
    assert time.monotonic() - began < MEET_SECONDS, "the head has waited until its nodes had to have met"
    host = network.address(1)
    assert f"launch-multinode.sh: {host} has ended alone; its lines are above. The others stop" in script.errors


def test_a_command_line_without_hosts_is_refused() -> None:
    done = subprocess.run([str(SCRIPT), "--", "MODEL"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "no hosts were given" in done.stderr


def test_keys_of_another_number_of_nodes_are_refused(tmp_path: Path) -> None:
    write_new_keys(tmp_path / "keys", 2)
    words = [str(SCRIPT), "--keys", str(tmp_path / "keys"), "one", "two", "three", "--", "model"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "has keys of another number of nodes than the 3 hosts" in done.stderr
