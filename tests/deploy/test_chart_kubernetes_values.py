"""Values that the chart hands to Kubernetes as they are: its schema takes what the API server takes, and no more."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest
from plait_testing.chart import GOOD, GROUP, needs_helm, refusal, rendered
from plait_testing.manifest_schemas import load_schema

pytestmark = needs_helm
Json = dict[str, Any]
SELECTOR = {"matchLabels": {"app": "a"}, "matchExpressions": [{"key": "k", "operator": "In", "values": ["v"]}]}
NODES = {"matchExpressions": [{"key": "gpu", "operator": "Gt", "values": ["4"]}]}
PODS = {"topologyKey": "zone", "labelSelector": SELECTOR, "namespaces": ["a"], "namespaceSelector": SELECTOR}
PEERS: list[Json] = [
    {"podSelector": {}},
    {"namespaceSelector": SELECTOR, "podSelector": SELECTOR},
    {"ipBlock": {"cidr": "10.0.0.0/8", "except": ["10.1.0.0/16"]}},
]
VALUES: Json = {
    "env": [
        {"name": "EMPTY"},
        {"name": "NCCL_SOCKET_IFNAME", "value": "eth0"},
        {"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
        {"name": "SECRET", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k", "optional": True}}},
        {"name": "CONFIG", "valueFrom": {"configMapKeyRef": {"name": "s", "key": "k"}}},
        {"name": "CPUS", "valueFrom": {"resourceFieldRef": {"resource": "requests.cpu", "divisor": "1"}}},
    ],
    "tolerations": [
        {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 60},
        {"key": "team", "operator": "Equal", "value": "ml"},
    ],
    "affinity": {
        "nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [NODES]},
            "preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 1, "preference": NODES}],
        },
        "podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [PODS]},
        "podAntiAffinity": {
            "preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 100, "podAffinityTerm": PODS}]
        },
    },
    "topologySpreadConstraints": [
        {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway", "labelSelector": SELECTOR}
    ],
    "networkPolicy": {"from": PEERS, "egress": [{"to": PEERS, "ports": [{"port": 443, "protocol": "TCP"}]}, {}]},
    "podLabels": {"example.com/team": "ml", "empty": ""},
    "podAnnotations": {"example.com/note": "a: b"},
    "nodeSelector": {"nvidia.com/gpu.product": "NVIDIA-H200"},
}


@pytest.mark.parametrize("values", [GOOD, GROUP], ids=["server", "group"])
def test_what_kubernetes_takes_the_chart_takes(values: Json) -> None:
    for manifest in rendered(values | VALUES).values():
        jsonschema.validate(manifest, load_schema(manifest), jsonschema.Draft7Validator)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"env": [{"name": "A", "vaule": "b"}]}, "at '/env/0': additional properties 'vaule'"),
        ({"env": [{"name": "A", "value": 1}]}, "at '/env/0/value': got number, want string"),
        ({"env": [{"name": "A", "value": True}]}, "at '/env/0/value': got boolean"),
        ({"env": [{"name": "A=B", "value": "b"}]}, "at '/env/0/name'"),
        ({"env": [{"name": "A", "value": "b", "valueFrom": {"fieldRef": {"fieldPath": "x"}}}]}, "at '/env/0'"),
        ({"env": [{"name": "A", "valueFrom": "b"}]}, "at '/env/0/valueFrom': got string, want object"),
        ({"env": [{"name": "A", "valueFrom": {"secretRef": {}}}]}, "'secretRef'"),
        ({"tolerations": [{"key": "a", "operator": "Exist"}]}, "at '/tolerations/0/operator'"),
        ({"tolerations": [{"key": "a", "effect": "NoStart"}]}, "at '/tolerations/0/effect'"),
        ({"tolerations": [{"key": "a", "value": True}]}, "at '/tolerations/0/value': got boolean"),
        ({"tolerations": [{"key": "a", "seconds": 1}]}, "'seconds'"),
        ({"tolerations": {"key": "a"}}, "at '/tolerations': got object, want array"),
        ({"affinity": {"nodeAfinity": {}}}, "'nodeAfinity'"),
        ({"affinity": {"nodeAffinity": {"required": {}}}}, "'required'"),
        ({"affinity": []}, "at '/affinity': got array, want object"),
        ({"topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": "zone"}]}, "'whenUnsatisfiable'"),
        (
            {"topologySpreadConstraints": [VALUES["topologySpreadConstraints"][0] | {"maxSkew": "1"}]},
            "at '/topologySpreadConstraints/0/maxSkew': got string, want integer",
        ),
        ({"networkPolicy": {"from": [{"namespace": "a"}]}}, "at '/networkPolicy/from/0': additional properties"),
        ({"networkPolicy": {"from": [{}]}}, "at '/networkPolicy/from/0'"),
        ({"networkPolicy": {"from": ["monitoring"]}}, "got string, want object"),
        ({"networkPolicy": {"from": [{"podSelector": {"app": "a"}}]}}, "at '/networkPolicy/from/0/podSelector'"),
        ({"networkPolicy": {"from": [PEERS[2] | PEERS[0]]}}, "at '/networkPolicy/from/0'"),
        ({"networkPolicy": {"egress": [{"from": PEERS}]}}, "at '/networkPolicy/egress/0'"),
        ({"networkPolicy": {"egress": [{"ports": [443]}]}}, "at '/networkPolicy/egress/0/ports/0'"),
        ({"podLabels": {"a key": "x"}}, "'a key'"),
        ({"podLabels": {"key": "two words"}}, "at '/podLabels/key'"),
        ({"image": {"pullSecrets": ["a", "a"]}}, "at '/image/pullSecrets'"),
    ],
)
def test_what_kubernetes_refuses_the_chart_refuses_by_name(values: Json, named: str) -> None:
    assert named in refusal(GOOD | values)
