"""KEDA's operator and its metrics server beside a played cluster, and a Prometheus that scrapes the pods for them.

Operator and Prometheus are in the clients' network, where pods have their addresses; the metrics server is on this
machine's loopback, where the API server finds it.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from plait_testing.control_plane import ControlPlane, free_ports
from plait_testing.lws_controller import make_certificate
from plait_testing.metrics_adapter import registration
from plait_testing.played_cluster import Cluster
from plait_testing.relay import into_clients, out_of_clients
from plait_testing.service_load import KEY
from plait_testing.service_network import CLIENTS

PROMETHEUS = "http://127.0.0.1:9091"
_METRICS_SERVICE = 9666
_API = "external.metrics.k8s.io"


@contextlib.contextmanager
def keda(cluster: Cluster) -> Iterator[None]:
    """Until the block ends; the control plane ends the processes."""
    if shutil.which("prometheus") is None:
        pytest.skip("no prometheus; install Debian's package prometheus")
    plane, folder = cluster.plane, cluster.plane.folder / "keda"
    folder.mkdir()
    make_certificate(folder)
    shutil.copy(folder / "tls.crt", folder / "ca.crt")
    inside = ["ip", "netns", "exec", cluster.network.namespace(CLIENTS)]
    with (
        into_clients(cluster.network, plane.port),
        out_of_clients(cluster.network, _METRICS_SERVICE),
        Discovery(cluster, folder / "pods.json"),
    ):
        plane.spawn("prometheus", [*inside, *prometheus(folder)])
        plane.spawn("keda", [*inside, *environment(plane), *operator(plane, folder)])
        (port, own) = free_ports(2)
        plane.spawn("keda-adapter", [*environment(plane), *adapter(plane, folder, port, own)])
        plane.apply(yaml.safe_dump_all(registration(_API, "v1beta1", port)))
        # This API server shows the metrics server no certificate, so that it takes the autoscaler for anybody.
        plane.kubectl("create", "clusterrole", "metrics", "--verb=get,list", f"--resource=*.{_API}")
        plane.kubectl("create", "clusterrolebinding", "metrics", "--clusterrole=metrics", "--user=system:anonymous")
        yield


def environment(plane: ControlPlane) -> list[str]:
    names = {"KUBECONFIG": plane.kubeconfig, "WATCH_NAMESPACE": "", "KEDA_CLUSTER_OBJECT_NAMESPACE": "default"}
    return ["env", "POD_NAMESPACE=default", *(f"{name}={value}" for name, value in names.items())]


def operator(plane: ControlPlane, folder: Path) -> Iterator[str]:
    yield str(plane.tools / "keda")
    yield f"--cert-dir={folder}"
    yield f"--metrics-service-bind-address=127.0.0.1:{_METRICS_SERVICE}"
    yield "--health-probe-bind-address=0"
    yield "--enable-prometheus-metrics=false"
    yield "--enable-webhook-patching=false"
    yield "--enable-apiservice-patching=false"


def adapter(plane: ControlPlane, folder: Path, port: int, own: int) -> Iterator[str]:
    yield str(plane.tools / "keda-adapter")
    yield f"--secure-port={port}"
    yield f"--port={own}"
    yield f"--cert-dir={folder}"
    yield f"--tls-cert-file={folder}/tls.crt"
    yield f"--tls-private-key-file={folder}/tls.key"
    yield f"--metrics-service-address=127.0.0.1:{_METRICS_SERVICE}"
    yield f"--lister-kubeconfig={plane.kubeconfig}"
    yield f"--authentication-kubeconfig={plane.kubeconfig}"
    yield f"--authorization-kubeconfig={plane.kubeconfig}"
    yield "--authentication-tolerate-lookup-failure"
    yield "--authorization-always-allow-paths=/apis,/apis/*,/openapi/*"


def prometheus(folder: Path) -> Iterator[str]:
    scrape = {
        "job_name": "pods",
        "scrape_interval": "1s",
        "authorization": {"credentials": KEY},
        "file_sd_configs": [{"files": [f"{folder}/pods.json"]}],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump({"scrape_configs": [scrape]}))
    yield "prometheus"
    yield f"--config.file={folder}/prometheus.yml"
    yield f"--storage.tsdb.path={folder}/data"
    yield f"--web.listen-address={PROMETHEUS.removeprefix('http://')}"


class Discovery(threading.Thread):
    """Tells Prometheus the pods, as its operator does by a PodMonitor: Debian's build cannot ask Kubernetes."""

    def __init__(self, cluster: Cluster, path: Path) -> None:
        super().__init__(daemon=True)
        self._cluster, self._path, self._asked_to_end = cluster, path, threading.Event()

    def __enter__(self) -> Discovery:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._asked_to_end.set()
        self.join()

    def run(self) -> None:
        while not self._asked_to_end.wait(0.5):
            pods = list(self._cluster.kubelet.pods.values())
            found = [
                {
                    "targets": [f"{self._cluster.network.address(pod.node)}:8000"],
                    "labels": {"namespace": "default", "pod": pod.name},
                }
                for pod in pods
            ]
            fresh = self._path.with_suffix(".new")
            fresh.write_text(json.dumps(found))
            fresh.rename(self._path)
