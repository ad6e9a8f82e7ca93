"""A control plane with one node, whose pods the mini-kubelet runs: what the tests of the chart's pods share."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from plait_testing import budgets
from plait_testing.control_plane import ControlPlane, missing_tool, wait_for
from plait_testing.kube_api import Api
from plait_testing.mini_kubelet import MiniKubelet
from plait_testing.node_network import NodeNetwork, reason_without_namespaces
from plait_testing.service_load import KEY, Load, load
from plait_testing.service_network import ServiceNetwork

TOOLS = Path(os.environ.get("PLAIT_CLUSTER_TOOLS", budgets.ROOT / "build" / "cluster"))
GOLDEN = budgets.ROOT / "tests" / "deploy" / "golden"
SECONDS = 400.0
"""Longest of each wait: a start on a machine that does other things."""
_PODS = 13


@dataclass(frozen=True)
class Cluster:
    """What runs, and how to reach it."""

    plane: ControlPlane
    kubelet: MiniKubelet
    network: NodeNetwork
    services: ServiceNetwork

    @property
    def url(self) -> str:
        """The server's, by the Service's address."""
        return self.services.url("plait")

    def ready(self) -> list[str]:
        """Addresses behind the Service."""
        return self.services.ready.get("plait", [])

    def load(self, clients: int = 2, num_tokens: int = 64) -> AbstractContextManager[Load]:
        """Clients that ask the Service until the block ends."""
        return load(self.network, self.url, lambda: bool(self.ready()), clients=clients, num_tokens=num_tokens)

    def serves(self, num_pods: int) -> bool:
        """Whether all pods are ready, and so many that answer HTTP are behind the Service, and no others."""
        pods = list(self.kubelet.pods.values())
        addresses = {self.network.address(pod.node) for pod in pods if "readinessProbe" in pod.container}
        are_ready = all(pod.is_ready and pod.ending is None for pod in pods)
        return are_ready and len(addresses) == num_pods and set(self.ready()) == addresses

    def wait_for(self, is_true: Any, what: str) -> None:
        wait_for(is_true, what, self.describe, SECONDS)

    def describe(self) -> str:
        """What was said, last things last."""
        logs = [f"{pod.name}: {pod.log[-2000:]}" for pod in self.kubelet.pods.values()]
        return "\n".join([*logs, *self.services.errors, *self.kubelet.messages])


@contextlib.contextmanager
def control_plane(folder: Path) -> Iterator[ControlPlane]:
    """One that runs and knows the charts' own kinds; the test is skipped where this machine has no tools for it."""
    if (missing := missing_tool(TOOLS)) is not None:
        pytest.skip(missing)
    plane = ControlPlane(TOOLS, folder)
    try:
        plane.start()
        plane.kubectl("apply", "--server-side", f"--filename={TOOLS / 'crds'}")
        wait_for(lambda: all(map(is_established, plane.get("crd"))), "the resource definitions")
        yield plane
    finally:
        plane.stop()


def is_established(definition: dict[str, Any]) -> bool:
    conditions = definition.get("status", {}).get("conditions") or []
    return any(one["type"] == "Established" and one["status"] == "True" for one in conditions)


@contextlib.contextmanager
def played_cluster(folders: pytest.TempPathFactory, models: Path) -> Iterator[Cluster]:
    """A plane, a node, keys, a claim of models, and who runs pods and reaches them."""
    if missing := "no iptables" if shutil.which("iptables") is None else reason_without_namespaces():
        pytest.skip(missing)
    with control_plane(folders.mktemp("plane")) as plane:
        add_node(plane)
        plane.kubectl("create", "secret", "generic", "plait-keys", f"--from-literal=keys.txt={KEY}")
        claim_models(plane)
        with (
            NodeNetwork(_PODS) as network,
            ServiceNetwork(plane, network, "default") as services,
            MiniKubelet(Api(plane), network, "default", folders.mktemp("pods"), models) as kubelet,
        ):
            yield Cluster(plane, kubelet, network, services)


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


def golden(name: str) -> list[dict[str, Any]]:
    """The rendered manifests of an example."""
    return [one for one in yaml.safe_load_all((GOLDEN / name).read_text()) if one is not None]


def render(example: str, values: dict[str, object], folder: Path) -> list[dict[str, Any]]:
    """The chart's manifests with an example's values, and these."""
    path, chart = folder / "values.yaml", budgets.ROOT / "deploy" / "chart"
    path.write_text(yaml.safe_dump(values))
    words = ["template", "plait", str(chart), "-f", str(chart / "examples" / example), "-f", str(path)]
    done = subprocess.run([TOOLS / "helm", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [one for one in yaml.safe_load_all(done.stdout) if one is not None]


def add_arguments(document: dict[str, Any], *words: str) -> None:
    """To the server's command line in a Deployment or LeaderWorkerSet."""
    spec = document["spec"]
    template = spec["template"] if document["kind"] == "Deployment" else spec["leaderWorkerTemplate"]["workerTemplate"]
    template["spec"]["containers"][0]["args"] += words
