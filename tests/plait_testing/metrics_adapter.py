"""Plays the adapter that gives the autoscaler pods' metrics: the custom metrics API, from what the pods export now."""

from __future__ import annotations

import contextlib
import datetime
import json
import ssl
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import yaml

from plait_testing.control_plane import ControlPlane
from plait_testing.lws_controller import make_certificate

GROUP, VERSION = "custom.metrics.k8s.io", "v1beta2"
_ROOT = f"/apis/{GROUP}/{VERSION}"
ReadPods = Callable[[str], dict[str, float]]
"""A metric's value for each pod, by the pod's name."""


@contextlib.contextmanager
def metrics_adapter(plane: ControlPlane, folder: Path, metrics: list[str], read: ReadPods) -> Iterator[None]:
    """Registered with the API server; the autoscaler asks for a metric of all pods of a namespace."""
    make_certificate(folder)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler(metrics, read))
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        plane.apply(yaml.safe_dump_all(registration(GROUP, VERSION, server.server_address[1])))
        yield
    finally:
        server.shutdown()


def registration(group: str, version: str, port: int) -> Iterator[dict[str, object]]:
    """Of an API that a server on loopback has, under a name that the API server's machine knows."""
    names = {"name": f"adapter-{port}", "namespace": "default"}
    yield {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": names,
        "spec": {"type": "ExternalName", "externalName": "localhost", "ports": [{"port": port}]},
    }
    yield {
        "apiVersion": "apiregistration.k8s.io/v1",
        "kind": "APIService",
        "metadata": {"name": f"{version}.{group}"},
        "spec": {
            "group": group,
            "version": version,
            "groupPriorityMinimum": 100,
            "versionPriority": 100,
            "insecureSkipTLSVerify": True,
            "service": names | {"port": port},
        },
    }


def handler(metrics: list[str], read: ReadPods) -> type[BaseHTTPRequestHandler]:
    """Answers discovery, and a metric of all pods of a namespace."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            words = self.path.partition("?")[0].removeprefix(_ROOT).strip("/").split("/")
            if not self.path.startswith(_ROOT):
                self.send_error(404)
            elif words == [""]:
                self._answer("v1", "APIResourceList", groupVersion=f"{GROUP}/{VERSION}", resources=resources(metrics))
            else:
                _, namespace, _, _, metric = words
                items = [value_of(namespace, pod, metric, value) for pod, value in read(metric).items()]
                self._answer(f"{GROUP}/{VERSION}", "MetricValueList", metadata={}, items=items)

        def _answer(self, version: str, kind: str, **fields: object) -> None:
            body = json.dumps({"apiVersion": version, "kind": kind} | fields).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    return Handler


def resources(metrics: list[str]) -> list[dict[str, object]]:
    common = {"singularName": "", "namespaced": True, "kind": "MetricValueList", "verbs": ["get"]}
    return [{"name": f"pods/{metric}"} | common for metric in metrics]


def value_of(namespace: str, pod: str, metric: str, value: float) -> dict[str, object]:
    return {
        "describedObject": {"kind": "Pod", "namespace": namespace, "name": pod, "apiVersion": "v1"},
        "metric": {"name": metric},
        "timestamp": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "value": f"{round(value * 1000)}m",
    }
