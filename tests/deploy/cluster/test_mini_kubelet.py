"""The chart's pods run: probes, drains and upgrades under load, beside a kubelet that is played."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml
from plait_testing import budgets
from plait_testing.control_plane import ControlPlane, missing_tool, wait_for
from plait_testing.mini_kubelet import MiniKubelet, enter_network
from plait_testing.node_network import NodeNetwork, reason_without_namespaces

pytestmark = pytest.mark.slow
TOOLS = Path(os.environ.get("PLAIT_CLUSTER_TOOLS", budgets.ROOT / "build" / "cluster"))
GOLDEN = budgets.ROOT / "tests" / "deploy" / "golden"
KEY = "sk-test-of-the-chart-0123456789abcdef"
SECONDS = 400.0
"""Longest of each wait: a start on a machine that does other things."""


class Load(threading.Thread):
    """One client that asks the Service, a connection for each request."""

    def __init__(self, network: NodeNetwork, addresses: list[str]) -> None:
        super().__init__()
        self._network, self._addresses = network, addresses
        self._asked_to_end = threading.Event()
        self.answered, self.failed = 0, list[str]()

    def run(self) -> None:
        enter_network(self._network, 0)
        while not self._asked_to_end.is_set():
            for address in list(self._addresses):
                self._ask(address)
                if self._asked_to_end.is_set():
                    return

    def _ask(self, address: str) -> None:
        body = {"prompt": "0123 4567", "max_tokens": 64, "ignore_eos": True}
        headers = {"Authorization": f"Bearer {KEY}"}
        try:
            done = httpx.post(f"{address}/v1/completions", json=body, headers=headers, timeout=60, trust_env=False)
        except httpx.TransportError as error:
            self.failed.append(f"{address}: {error!r}")
            return
        if done.status_code == httpx.codes.OK:
            self.answered += 1
        else:
            self.failed.append(f"{address}: {done.status_code} {done.text}")

    def end(self) -> None:
        self._asked_to_end.set()
        self.join()


class Balancer(threading.Thread):
    """Plays kube-proxy: keeps a Service's ready addresses."""

    def __init__(self, kubelet: MiniKubelet) -> None:
        super().__init__(daemon=True)
        self._kubelet = kubelet
        self._asked_to_end = threading.Event()
        self.addresses: list[str] = []

    def run(self) -> None:
        while not self._asked_to_end.wait(0.2):
            self.addresses[:] = self._kubelet.endpoints("plait")

    def end(self) -> None:
        self._asked_to_end.set()
        self.join()


@pytest.fixture(scope="module")
def running(
    tmp_path_factory: pytest.TempPathFactory, check_models: Path
) -> Iterator[tuple[ControlPlane, MiniKubelet, NodeNetwork, Balancer]]:
    """The CPU example: two servers of recall-gqa behind a Service, ready."""
    if missing := missing_tool(TOOLS) or reason_without_namespaces():
        pytest.skip(missing)
    plane = ControlPlane(TOOLS, tmp_path_factory.mktemp("plane"))
    folder = tmp_path_factory.mktemp("pods")
    try:
        plane.start()
        add_node(plane)
        plane.kubectl("create", "secret", "generic", "plait-keys", f"--from-literal=keys.txt={KEY}")
        claim_models(plane)
        apply_example(plane, "cpu.yaml")
        with NodeNetwork(7) as network, MiniKubelet(plane, network, "default", folder, check_models) as kubelet:
            balancer = Balancer(kubelet)
            balancer.start()
            wait_for(lambda: len(balancer.addresses) == 2, "two ready pods", lambda: describe(kubelet), SECONDS)
            yield plane, kubelet, network, balancer
            balancer.end()
    finally:
        plane.stop()


def describe(kubelet: MiniKubelet) -> str:
    return "\n".join([*kubelet.messages, *(f"{pod.name}: {pod.log[-2000:]}" for pod in kubelet.pods.values())])


def add_node(plane: ControlPlane) -> None:
    plane.apply(yaml.safe_dump({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "node-0"}}))
    amounts = {"cpu": "64", "memory": "256Gi", "pods": "100", "ephemeral-storage": "1Ti"}
    condition = {"type": "Ready", "status": "True", "reason": "Test"}
    plane.patch_status("node", "node-0", {"capacity": amounts, "allocatable": amounts, "conditions": [condition]})


def claim_models(plane: ControlPlane) -> None:
    spec = {"accessModes": ["ReadWriteMany"], "storageClassName": ""}
    disk = spec | {"capacity": {"storage": "1Gi"}, "hostPath": {"path": "/nowhere"}}
    disk["claimRef"] = {"namespace": "default", "name": "models"}
    request = spec | {"resources": {"requests": {"storage": "1Gi"}}, "volumeName": "models"}
    for kind, part in (("PersistentVolume", disk), ("PersistentVolumeClaim", request)):
        plane.apply(yaml.safe_dump({"apiVersion": "v1", "kind": kind, "metadata": {"name": "models"}, "spec": part}))


def apply_example(plane: ControlPlane, name: str, *more_args: str) -> None:
    documents = [one for one in yaml.safe_load_all((GOLDEN / name).read_text()) if one is not None]
    for one in documents:
        if one["kind"] == "Deployment":
            # Two pods, a client and a control plane share this machine's cores.
            one["spec"]["template"]["spec"]["containers"][0]["args"] += ["--threads=1", "--num-pages=128", *more_args]
    plane.apply(yaml.safe_dump_all(documents))


def is_rolled_out(plane: ControlPlane) -> bool:
    found = plane.get("deployment", "plait")
    status = found["status"]
    counts = [status.get(name) for name in ("replicas", "updatedReplicas", "readyReplicas")]
    return bool(status.get("observedGeneration") == found["metadata"]["generation"] and counts == [2, 2, 2])


@pytest.fixture
def load(running: tuple[ControlPlane, MiniKubelet, NodeNetwork, Balancer]) -> Iterator[list[Load]]:
    _, _, network, balancer = running
    clients = [Load(network, balancer.addresses) for _ in range(2)]
    for client in clients:
        client.start()
    yield clients
    for client in clients:
        client.end()


def finish(clients: list[Load]) -> tuple[int, list[str]]:
    """Requests answered and failed, once the clients have ended."""
    for client in clients:
        client.end()
    return sum(client.answered for client in clients), [reason for client in clients for reason in client.failed]


def test_an_upgrade_under_load_fails_no_request(
    running: tuple[ControlPlane, MiniKubelet, NodeNetwork, Balancer], load: list[Load]
) -> None:
    plane, kubelet, _, _ = running
    before, started = set(kubelet.pods), time.monotonic()
    apply_example(plane, "cpu.yaml", "--max-seqs=8")
    wait_for(lambda: is_rolled_out(plane), "the upgrade", lambda: describe(kubelet), SECONDS)
    wait_for(lambda: not before & set(kubelet.pods), "the end of the old pods", lambda: describe(kubelet), SECONDS)
    print(f"upgraded in {time.monotonic() - started:.1f} s")
    answered, failed = finish(load)
    assert failed == []
    assert answered > 20
    assert len([line for line in kubelet.messages if line.endswith("was deleted and ended with 0")]) == 2
    assert all("--max-seqs=8" in pod.container["args"] for pod in kubelet.pods.values())


def test_a_deleted_pod_drains_and_another_takes_its_place(
    running: tuple[ControlPlane, MiniKubelet, NodeNetwork, Balancer], load: list[Load]
) -> None:
    plane, kubelet, _, balancer = running
    gone = next(iter(kubelet.pods.values()))
    plane.kubectl("delete", "pod", gone.name, "--wait=false")
    wait_for(
        lambda: gone in kubelet.ended and len(balancer.addresses) == 2, "a new pod", lambda: describe(kubelet), SECONDS
    )
    answered, failed = finish(load)
    assert failed == []
    assert answered > 0
    assert f"{gone.name} was deleted and ended with 0" in kubelet.messages


def test_a_killed_server_is_started_again_and_leaves_the_service_until_it_is_ready(
    running: tuple[ControlPlane, MiniKubelet, NodeNetwork, Balancer],
) -> None:
    _, kubelet, _, balancer = running
    pod = next(iter(kubelet.pods.values()))
    assert pod.process is not None
    pod.process.send_signal(signal.SIGKILL)
    wait_for(lambda: len(balancer.addresses) == 1, "its absence", lambda: describe(kubelet), SECONDS)
    wait_for(lambda: len(balancer.addresses) == 2, "its return", lambda: describe(kubelet), SECONDS)
    assert pod.restarts == 1
