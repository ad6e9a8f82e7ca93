"""Nodes on one machine: network namespaces with an address each, joined by a switch that has no other wire."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import psutil

from plait_testing.running_server import READY, Server

TESTS = Path(__file__).resolve().parent.parent
_NAMES = Path("/etc/netns")
"""`ip netns exec` mounts the files of a namespace's folder over those of /etc."""
_CLONE_NEWNET = 0x4000_0000


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


def enter_namespace(name: str) -> None:
    """Move this thread, and those that it starts, into the network: sockets that they open belong there."""
    with Path("/run/netns", name).open() as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), "setns")


@functools.cache
def reason_without_namespaces() -> str:
    """Why this machine gives no network namespaces; empty if it does."""
    try:
        with NodeNetwork(1):
            return ""
    except (OSError, subprocess.CalledProcessError) as error:
        return f"no network namespaces: {getattr(error, 'stderr', '') or error}".strip()


class NodeNetwork:
    """`num_nodes` namespaces. Node N has the address 10.77.0.(N + 1), or fd77::(N + 1)."""

    def __init__(self, num_nodes: int, *, has_ipv6: bool = False) -> None:
        self._has_ipv6 = has_ipv6
        # A run that was killed leaves its namespaces behind, and its process's number to another.
        self._name = f"plait{os.getpid()}-{secrets.token_hex(4)}"
        self._switch = f"{self._name}-switch"
        self.num_nodes = num_nodes
        self._started: list[Server] = []

    def __enter__(self) -> Self:
        try:
            ip("netns", "add", self._switch)
            ip("-n", self._switch, "link", "add", "bridge", "type", "bridge")
            ip("-n", self._switch, "link", "set", "bridge", "up")
            for node in range(self.num_nodes):
                self._add(node)
        except (OSError, subprocess.CalledProcessError):
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for one in self._started:
            one.kill()
        for name in [self._switch, *map(self.namespace, range(self.num_nodes))]:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
            shutil.rmtree(_NAMES / name, ignore_errors=True)

    def _add(self, node: int) -> None:
        name = self.namespace(node)
        ip("netns", "add", name)
        ip("-n", self._switch, "link", "add", f"port{node}", "type", "veth", "peer", "name", "eth0", "netns", name)
        ip("-n", self._switch, "link", "set", f"port{node}", "master", "bridge", "up")
        size = ["64", "nodad"] if self._has_ipv6 else ["24"]
        ip("-n", name, "address", "add", f"{self.address(node)}/{size[0]}", "dev", "eth0", *size[1:])
        for device in ("lo", "eth0"):
            ip("-n", name, "link", "set", device, "up")

    def namespace(self, node: int) -> str:
        return f"{self._name}-{node}"

    def address(self, node: int) -> str:
        return f"fd77::{node + 1}" if self._has_ipv6 else f"10.77.0.{node + 1}"

    def cut_off(self, node: int) -> None:
        """Drop all that the node sends or should get; nobody is told."""
        ip("-n", self._switch, "link", "set", f"port{node}", "down")

    def write_hosts(self, lines: str) -> None:
        """Into the `/etc/hosts` of all nodes, beside their own; commands see it that were started after the first."""
        for node in range(self.num_nodes):
            folder = _NAMES / self.namespace(node)
            folder.mkdir(parents=True, exist_ok=True)
            with (folder / "hosts").open("w") as hosts:  # the file that is mounted, not another in its place
                hosts.write("127.0.0.1 localhost\n" + lines)

    def drop_port(self, node: int, port: int) -> None:
        """Drop all that the node sends to or from a TCP port: connections are half open, others go on."""
        table = "ip6tables" if self._has_ipv6 else "iptables"
        for side in ("--dport", "--sport"):
            rule = [table, "-w", "-A", "OUTPUT", "-o", "eth0", "-p", "tcp", side, str(port), "-j", "DROP"]
            ip("netns", "exec", self.namespace(node), *rule)

    def heal(self, node: int) -> None:
        """Undo `cut_off` and `drop_port`."""
        ip("-n", self._switch, "link", "set", f"port{node}", "up")
        table = "ip6tables" if self._has_ipv6 else "iptables"
        ip("netns", "exec", self.namespace(node), table, "-w", "-F", "OUTPUT")

    def command(self, node: int, *words: str) -> list[str]:
        """A command line that runs Python on the node."""
        return ["ip", "netns", "exec", self.namespace(node), sys.executable, *words]

    def launch(self, node: int, log: Path, model: Path, *flags: str, **environment: str) -> Server:
        """Start `plait launch` on the node. Its standard output goes to `log` too, with the suffix `.out`."""
        words = ["-m", "plait.cli", "launch", str(model), "--port", "0", "--threads", "1", *flags]
        with log.open("w") as errors:
            process = subprocess.Popen(
                self.command(node, *words),
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                bufsize=1,
                start_new_session=True,
                env=os.environ | environment,
            )
        self._started.append(Server(process, log))
        return self._started[-1]

    def launch_all(self, folder: Path, model: Path, keys: Path, *flags: str) -> list[Server]:
        """Start it on all nodes, the head last."""
        return [
            self.launch(node, folder / f"node-{node}.log", model, *self.place(node, keys), *flags)
            for node in reversed(range(self.num_nodes))
        ][::-1]

    def place(self, node: int, keys: Path) -> list[str]:
        """The flags that say which node it is."""
        where = ["--head", self.address(0), "--keys", str(keys)]
        return ["--nnodes", str(self.num_nodes), "--node-rank", str(node), *where]

    def open_ports(self, node: int) -> set[int]:
        """TCP ports at which the node listens for others."""
        listed = subprocess.run(
            ["ip", "netns", "exec", self.namespace(node), "ss", "-Hltn"], check=True, capture_output=True, text=True
        )
        ends = [line.split()[3].rsplit(":", 1) for line in listed.stdout.splitlines()]
        return {int(port) for host, port in ends if host not in ("127.0.0.1", "[::1]")}

    def hold_port(self, node: int) -> int:
        """Let another process of the node listen on the port that it returns."""
        port = 8000
        program = f"import socket, time; held = socket.create_server(('127.0.0.1', {port})); print('held', flush=True)"
        holder = subprocess.Popen(
            self.command(node, "-c", f"{program}; time.sleep(600)"), stdout=subprocess.PIPE, text=True
        )
        self._started.append(Server(holder, Path(os.devnull)))
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        return port

    def wrong_recall(self, node: int, url: str, model: str, num: int, context: int) -> list[str]:
        """Ask recall problems from the node itself; the wrong answers."""
        done = self._ask(node, url, model, str(num), str(context))
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    def try_recall(self, node: int, url: str, model: str, num: int = 1) -> None:
        """Ask a server that may end meanwhile."""
        self._ask(node, url, model, str(num), "512")

    def _ask(self, node: int, *words: str) -> subprocess.CompletedProcess[str]:
        path = os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH"))))
        return subprocess.run(
            self.command(node, "-m", "plait_testing.ask_recall", *words),
            capture_output=True,
            text=True,
            check=False,
            env=os.environ | {"PYTHONPATH": path},
        )


def wait_for_all(nodes: Sequence[Server], seconds: float) -> list[int]:
    """The exit codes, once all have ended."""
    deadline = time.monotonic() + seconds
    for one in nodes:
        rest, _ = one.process.communicate(timeout=max(0.1, deadline - time.monotonic()))
        one.lines += rest.splitlines()
    return [one.process.returncode for one in nodes]


def workers_of(node: Server) -> list[psutil.Process]:
    """The ranks that the node's engine has started."""
    return [process for process in node.workers() if _is_rank(process)]


def _is_rank(process: psutil.Process) -> bool:
    """False if it is gone."""
    with contextlib.suppress(psutil.Error):
        return "plait_worker" in process.cmdline()
    return False


def has_engine(node: Server) -> bool:
    """Whether the node has an engine of its own, not ranks of the head's alone."""
    return any("plait.nodes.engine_process" in process.cmdline() for process in node.workers())


def door(head: Server, node: int, start: int = 0) -> str:
    """The URL of a node's own engine, once the combined log has it; `start` counts the restarts of all nodes."""
    line = re.compile(rf"^\[node {node}\] {re.escape(READY)}(\S+)", re.MULTILINE)
    while len(found := line.findall(head.errors)) <= start:
        assert head.process.poll() is None, head.errors
        time.sleep(0.05)
    return str(found[start])


def exhaust_memory(rank: psutil.Process) -> None:
    """Let the kernel give the process no more memory."""
    rank.rlimit(psutil.RLIMIT_AS, (1 << 20, 1 << 20))


def starve_a_rank(network: NodeNetwork, nodes: Sequence[Server], model: str) -> float:
    """Take memory from a rank of node 1, and ask ever more at once until the rank has asked for some.

    Returns when the request began that it could not answer, by the monotonic clock.
    """
    rank = workers_of(nodes[1])[0]
    exhaust_memory(rank)
    node = 1 if has_engine(nodes[1]) else 0
    url = door(nodes[0], node)
    for num_problems in range(1, 20):
        asked = time.monotonic()
        network.try_recall(node, url, model, num_problems)
        if not rank.is_running() or rank.status() == psutil.STATUS_ZOMBIE:
            return asked
    raise AssertionError("the rank asks for no memory")


def interrupt(node: Server) -> None:
    node.process.send_signal(signal.SIGINT)
