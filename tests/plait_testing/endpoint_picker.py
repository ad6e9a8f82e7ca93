"""The endpoint picker of the Gateway API inference extension, beside a played cluster, asked as Envoy asks it.

Envoy speaks ext_proc: a stream of gRPC with the request's headers and body, of which the answer names an endpoint. The
few fields that are needed are written by hand, so that no gRPC package is installed for one test.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from plait_testing import budgets
from plait_testing.metrics import parse_metrics
from plait_testing.node_network import NodeNetwork
from plait_testing.played_cluster import Cluster
from plait_testing.relay import into_clients
from plait_testing.service_network import CLIENTS

CONFIG = budgets.ROOT / "deploy" / "gateway" / "endpoint-picker.yaml"
_GRPC, _HEALTH, _METRICS = 9002, 9003, 9090
_ASK = "envoy.service.ext_proc.v3.ExternalProcessor/Process"
_ADDRESS = re.compile(rb"x-gateway-destination-endpoint.{1,4}?(\d+\.\d+\.\d+\.\d+):(\d+)", re.DOTALL)


@dataclass(frozen=True)
class EndpointPicker:
    """Its process is in the clients' network: pods have their addresses there."""

    network: NodeNetwork
    log: Path

    def gauges(self) -> dict[str, float]:
        """What it says of the pool on its own page; empty until it answers."""
        done = self._curl(f"http://127.0.0.1:{_METRICS}/metrics")
        return {
            name: value for name, value in parse_metrics(done.decode()).items() if name.startswith("inference_pool_")
        }

    def pick(self, model: str, prompt: str) -> str:
        """The address that a request goes to; empty if it names none."""
        body = json.dumps({"model": model, "prompt": prompt, "max_tokens": 4}).encode()
        names = {":method": "POST", ":path": "/v1/completions", "content-type": "application/json", "x-request-id": "1"}
        headers = b"".join(
            _field(1, _field(1, name.encode()) + _field(3, text.encode())) for name, text in names.items()
        )
        messages = [_field(2, _field(1, headers)), _field(4, _field(1, body) + b"\x10\x01")]
        framed = b"".join(b"\0" + len(one).to_bytes(4, "big") + one for one in messages)
        words = ["--http2-prior-knowledge", "--header", "content-type: application/grpc", "--header", "te: trailers"]
        found = _ADDRESS.search(
            self._curl(*words, "--data-binary", "@-", f"http://127.0.0.1:{_GRPC}/{_ASK}", data=framed)
        )
        return found[1].decode() if found is not None else ""

    def _curl(self, *words: str, data: bytes | None = None) -> bytes:
        command = [
            "ip",
            "netns",
            "exec",
            self.network.namespace(CLIENTS),
            "curl",
            "--silent",
            "--max-time",
            "30",
            *words,
        ]
        return subprocess.run(command, input=data, capture_output=True, check=False).stdout


def _field(number: int, data: bytes) -> bytes:
    """A field of a protobuf message that holds bytes."""
    size, rest = bytearray(), len(data)
    while rest > 0x7F:
        size.append(rest & 0x7F | 0x80)
        rest >>= 7
    return bytes([number << 3 | 2, *size, rest]) + data


@contextlib.contextmanager
def endpoint_picker(cluster: Cluster, pool: str) -> Iterator[EndpointPicker]:
    """Of a pool that exists."""
    plane, network = cluster.plane, cluster.network
    flags = [
        f"--config-file={CONFIG}",
        f"--pool-name={pool}",
        "--pool-namespace=default",
        f"--grpc-port={_GRPC}",
        f"--grpc-health-port={_HEALTH}",
        f"--metrics-port={_METRICS}",
        "--metrics-endpoint-auth=false",
        "--secure-serving=false",
        "--tracing=false",
        "--refresh-prometheus-metrics-interval=500ms",
    ]
    command = ["ip", "netns", "exec", network.namespace(CLIENTS), str(plane.tools / "epp"), *flags]
    path = plane.folder / "epp.log"
    with into_clients(network, plane.port), path.open("wb") as log:
        environment = os.environ | {"KUBECONFIG": str(plane.kubeconfig)}
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        try:
            yield EndpointPicker(network, path)
        finally:
            process.terminate()
            process.wait()
