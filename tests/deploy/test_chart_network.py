"""The network policy lets in who must reach the pods: the gateway, the endpoint picker, Prometheus; and nobody else."""

from __future__ import annotations

from typing import Any

import pytest
from plait_testing.chart import GOOD, needs_helm, refusal, rendered
from plait_testing.played_cluster import GOLDEN, golden

Json = dict[str, Any]
EXAMPLES = sorted(path.name for path in GOLDEN.glob("*.yaml"))
MONITORING = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]


def lets_in(policy: Json, namespace: str, pod_labels: dict[str, str] | None = None) -> bool:
    """Whether a pod of another namespace, or of the release's, `default`, may reach the port of HTTP."""
    rules = [rule for rule in policy["spec"]["ingress"] if {"port": "http", "protocol": "TCP"} in rule.get("ports", [])]
    labels = {"kubernetes.io/metadata.name": namespace}

    def is_peer(peer: Json) -> bool:
        where = selects(peer["namespaceSelector"], labels) if "namespaceSelector" in peer else namespace == "default"
        return where and selects(peer.get("podSelector", {}), pod_labels or {})

    return any(is_peer(peer) for rule in rules for peer in rule["from"])


def selects(selector: Json, labels: dict[str, str]) -> bool:
    return bool(selector.get("matchLabels", {}).items() <= labels.items())


def policy_of(documents: list[Json]) -> Json:
    (found,) = (one for one in documents if one["kind"] == "NetworkPolicy")
    return found


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_lets_in_whom_it_needs(name: str) -> None:
    documents = golden(name)
    kinds, policy = {one["kind"] for one in documents}, policy_of(documents)
    if kinds & {"PodMonitor", "ScaledObject", "HorizontalPodAutoscaler"}:
        assert lets_in(policy, "monitoring"), "Prometheus"
    if "InferencePool" in kinds:
        assert lets_in(policy, "default", {"app": "plait-endpoint-picker"}), "the endpoint picker"
        assert lets_in(policy, "gateway")
    if "ScaledObject" in kinds:
        assert "PodMonitor" in kinds, "KEDA's queries have no values otherwise"
    assert not lets_in(policy, "elsewhere")


@needs_helm
@pytest.mark.parametrize(
    ("policy", "peers"),
    [
        ({}, {"default"}),
        ({"prometheus": MONITORING}, {"default", "monitoring"}),
        ({"from": MONITORING}, {"monitoring"}),
        ({"from": [{"ipBlock": {"cidr": "10.0.0.0/8"}}], "prometheus": [{"podSelector": {}}]}, {"default"}),
    ],
)
def test_prometheus_comes_in_beside_those_who_use_the_api(policy: Json, peers: set[str]) -> None:
    made = rendered(GOOD | {"networkPolicy": policy})["NetworkPolicy"]
    for rule in made["spec"]["ingress"]:
        rule["from"] = [peer for peer in rule["from"] if "ipBlock" not in peer]
    assert {name for name in ("default", "monitoring", "elsewhere") if lets_in(made, name)} == peers


@needs_helm
@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"monitoring": {"podMonitor": True, "keySecret": "k"}}, "monitoring.podMonitor is true"),
        ({"autoscaling": {"kind": "keda"}}, "autoscaling.kind is keda"),
        ({"autoscaling": {"kind": "hpa"}}, "autoscaling.kind is hpa"),
    ],
)
def test_a_policy_without_prometheus_is_refused_where_one_must_read(values: Json, named: str) -> None:
    said = refusal(GOOD | values)
    assert named in said
    assert "networkPolicy.prometheus names nobody" in said
    assert rendered(GOOD | values | {"networkPolicy": {"prometheus": MONITORING}})
    assert rendered(GOOD | values | {"networkPolicy": {"enabled": False}})


@needs_helm
@pytest.mark.parametrize("kind", ["LoadBalancer", "NodePort"])
def test_a_service_for_others_is_refused_with_a_policy_for_the_namespace_alone(kind: str) -> None:
    values = GOOD | {"service": {"type": kind}}
    assert f"service.type is {kind}" in refusal(values)
    assert "networkPolicy.from" in refusal(values)
    assert rendered(values | {"networkPolicy": {"from": [{"ipBlock": {"cidr": "10.0.0.0/8"}}]}})
    assert rendered(values | {"networkPolicy": {"enabled": False}})
