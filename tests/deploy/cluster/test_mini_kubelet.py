"""The chart's pods run: probes, drains and upgrades under load, beside a kubelet that is played."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from plait_testing import budgets
from plait_testing.control_plane import ControlPlane
from plait_testing.metrics import parse_metrics, sum_over_replicas
from plait_testing.metrics_adapter import metrics_adapter
from plait_testing.mini_kubelet import Pod, enter_network
from plait_testing.played_cluster import Cluster, add_arguments, golden, played_cluster
from plait_testing.recording import Record
from plait_testing.service_load import KEY
from plait_testing.service_network import CLIENTS

pytestmark = [pytest.mark.slow, pytest.mark.acceptance("cluster")]
WAITING = "plait_requests_waiting"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, check_models: Path) -> Iterator[Cluster]:
    """The CPU example: two servers of recall-gqa behind a Service, ready."""
    with played_cluster(tmp_path_factory, check_models) as made:
        apply_servers(made.plane)
        made.wait_for(lambda: made.serves(2), "two ready pods")
        yield made


def apply_servers(plane: ControlPlane, *more_args: str) -> None:
    documents = golden("cpu.yaml")
    for one in documents:
        if one["kind"] == "HorizontalPodAutoscaler":
            one["spec"]["behavior"]["scaleDown"]["stabilizationWindowSeconds"] = 5  # the example's are ten minutes
        if one["kind"] == "Deployment":
            # Two pods, a client and a control plane share this machine's cores.
            add_arguments(one, "--threads=1", "--num-pages=128", *more_args)
    plane.apply(yaml.safe_dump_all(documents))


def is_rolled_out(plane: ControlPlane) -> bool:
    found = plane.get("deployment", "plait")
    status = found["status"]
    counts = [status.get(name) for name in ("replicas", "updatedReplicas", "readyReplicas")]
    return bool(status.get("observedGeneration") == found["metadata"]["generation"] and counts == [2, 2, 2])


def test_an_upgrade_under_load_fails_no_request(cluster: Cluster, record: Record) -> None:
    kubelet = cluster.kubelet
    before, started = set(kubelet.pods), time.monotonic()
    with cluster.load() as asked:
        apply_servers(cluster.plane, "--max-seqs=8")
        cluster.wait_for(lambda: is_rolled_out(cluster.plane), "the upgrade")
        cluster.wait_for(lambda: not before & set(kubelet.pods), "the end of the old pods")
        seconds = time.monotonic() - started
    case = "upgrade of two servers under load"
    record(case, "wall", "seconds", seconds)
    record(case, "num_answered", "requests", asked.answered)
    record(case, "num_failed", "requests", len(asked.failed), 0)
    assert asked.failed == []
    assert asked.answered > 20
    assert len([line for line in kubelet.messages if line.endswith("was deleted and ended with 0")]) == 2
    assert all("--max-seqs=8" in pod.container["args"] for pod in kubelet.pods.values())


def test_a_deleted_pod_drains_and_another_takes_its_place(cluster: Cluster, record: Record) -> None:
    gone = next(iter(cluster.kubelet.pods.values()))
    with cluster.load() as asked:
        cluster.plane.kubectl("delete", "pod", gone.name, "--wait=false")
        cluster.wait_for(lambda: gone in cluster.kubelet.ended and cluster.serves(2), "a new pod")
    record("a pod of two is deleted under load", "num_answered", "requests", asked.answered)
    record("a pod of two is deleted under load", "num_failed", "requests", len(asked.failed), 0)
    assert asked.failed == []
    assert asked.answered > 0
    assert f"{gone.name} was deleted and ended with 0" in cluster.kubelet.messages


def test_a_killed_server_is_started_again_and_leaves_the_service_until_it_is_ready(cluster: Cluster) -> None:
    pod = next(iter(cluster.kubelet.pods.values()))
    assert pod.process is not None
    pod.process.send_signal(signal.SIGKILL)
    cluster.wait_for(lambda: len(cluster.ready()) == 1, "its absence")
    cluster.wait_for(lambda: cluster.serves(2), "its return")
    assert pod.restarts == 1


def test_a_pod_without_its_secret_waits_and_says_so_until_the_secret_is_there(cluster: Cluster) -> None:
    plane, gone = cluster.plane, next(iter(cluster.kubelet.pods.values()))
    kept = plane.kubectl("get", "secret", "plait-keys", "--output=yaml")
    plane.kubectl("delete", "secret", "plait-keys")
    plane.kubectl("delete", "pod", gone.name, "--wait=false")

    def waiting() -> str:
        lines = plane.kubectl("get", "pods").splitlines()
        return next((line.split()[0] for line in lines if "ContainerCreating" in line), "")

    cluster.wait_for(waiting, "a pod that waits")
    words = 'secret "plait-keys" not found'
    cluster.wait_for(lambda: words in plane.kubectl("describe", "pod", waiting()), "its event")
    assert words in (budgets.ROOT / "docs" / "deploying.md").read_text()
    assert len(cluster.ready()) == 1
    plane.kubectl("create", "--filename=-", text=kept)
    cluster.wait_for(lambda: cluster.serves(2), "its start")


def test_the_autoscaler_follows_the_queue(cluster: Cluster, tmp_path: Path, record: Record) -> None:
    """The server's gauge, a played adapter, the real autoscaler: four requests may wait for each pod."""
    apply_servers(cluster.plane, "--max-seqs=2")
    cluster.wait_for(lambda: is_rolled_out(cluster.plane), "servers of two requests at a time")
    with metrics_adapter(cluster.plane, tmp_path, [WAITING], lambda metric: metric_of_pods(cluster, metric)):
        started = time.monotonic()
        with cluster.load(clients=16, num_tokens=128) as asked:
            cluster.wait_for(lambda: desired(cluster) == 3, "the autoscaler's word")
            decided = time.monotonic() - started
            waiting = current(cluster)
            cluster.wait_for(lambda: cluster.serves(3), "a third server")
            served = time.monotonic() - started
        ended = time.monotonic()
        cluster.wait_for(lambda: desired(cluster) == 2 and cluster.serves(2), "two servers again")
    assert waiting > 4
    assert asked.failed == []
    case = "16 streams on two servers of two requests each, four may wait for each"
    record(case, "wall_until_decided", "seconds", decided)
    record(case, "wall_until_a_third_is_ready", "seconds", served)
    record(case, "wall_until_two_again", "seconds", time.monotonic() - ended)
    record(case, "num_failed", "requests", len(asked.failed), 0)


def metric_of_pods(cluster: Cluster, metric: str) -> dict[str, float]:
    """Of each ready pod, as it exports it."""
    pods = [pod for pod in cluster.kubelet.pods.values() if pod.is_ready and pod.ending is None]
    headers = {"Authorization": f"Bearer {KEY}"}

    def read(pod: Pod) -> float:
        url = f"http://{cluster.network.address(pod.node)}:8000/metrics"
        text = httpx.get(url, headers=headers, timeout=30, trust_env=False).raise_for_status().text
        return sum_over_replicas(parse_metrics(text))[metric]

    with ThreadPoolExecutor(1, initializer=enter_network, initargs=(cluster.network, CLIENTS)) as pool:
        return dict(zip((pod.name for pod in pods), pool.map(read, pods), strict=True))


def autoscaler(cluster: Cluster) -> dict[str, Any]:
    found: dict[str, Any] = cluster.plane.get("hpa", "plait")["status"]
    return found


def desired(cluster: Cluster) -> int:
    return int(autoscaler(cluster)["desiredReplicas"])


def current(cluster: Cluster) -> float:
    """Requests that wait for a pod, as the autoscaler sees it."""
    value = str(autoscaler(cluster)["currentMetrics"][0]["pods"]["current"]["averageValue"])
    return float(value.removesuffix("m")) / (1000 if value.endswith("m") else 1)
