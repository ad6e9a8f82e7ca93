"""What the chart tells Prometheus: names that stay when pods are made anew, and that the alerts know."""

from __future__ import annotations

import re
from typing import Any

import pytest
from plait_testing import budgets
from plait_testing.chart import GOOD, GROUP, needs_helm, rendered

pytestmark = needs_helm
MONITORED = {
    "monitoring": {"podMonitor": True, "keySecret": "k"},
    "networkPolicy": {"prometheus": [{"podSelector": {}}]},
}


def labels_of_a_target(values: dict[str, Any], pod: str, address: str) -> dict[str, str]:
    """As the operator's configuration makes them, the PodMonitor's relabelings last."""
    monitor = rendered(values | MONITORED)["PodMonitor"]
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    found = {"job": f"default/{monitor['metadata']['name']}", "instance": address, "__meta_kubernetes_pod_name": pod}
    for rule in endpoint["relabelings"]:
        found[rule["targetLabel"]] = rule.get("replacement") or found[rule["sourceLabels"][0]]
    return found


def jobs_of_the_alerts() -> set[str]:
    return set(re.findall(r'job=~"([^"]+)"', (budgets.ROOT / "deploy/prometheus/alerts.yaml").read_text()))


def test_a_pod_made_anew_keeps_its_instance() -> None:
    first, second = (labels_of_a_target(GROUP, "plait-group-0", f"10.0.0.{n}:8000")["instance"] for n in (1, 2))
    assert first == second == "plait-group-0"


@pytest.mark.parametrize("override", ["", "llama", "123"])
def test_alerts_know_the_job_of_any_release(override: str) -> None:
    values = GOOD | {"nameOverride": override, "fullnameOverride": f"a{override}" if override else ""}
    job = labels_of_a_target(values, "p", "a")["job"]
    assert jobs_of_the_alerts()
    assert all(re.fullmatch(pattern, job) for pattern in jobs_of_the_alerts())


def test_releases_have_jobs_of_their_own() -> None:
    jobs = {labels_of_a_target(GOOD | {"fullnameOverride": name}, "p", "a")["job"] for name in ("llama", "qwen")}
    assert jobs == {"plait/default/llama", "plait/default/qwen"}


def pods_that_keda_reads(values: dict[str, Any]) -> re.Pattern[str]:
    """Of all its queries."""
    scaled = rendered(values | MONITORED | {"autoscaling": {"kind": "keda"}})["ScaledObject"]
    queries = [trigger["metadata"]["query"] for trigger in scaled["spec"]["triggers"]]
    (pattern,) = {re.findall(r'namespace="default",pod=~"([^"]+)"', query)[0] for query in queries}
    return re.compile(pattern)


@pytest.mark.parametrize(
    ("values", "own", "others"),
    [
        (
            GOOD,
            ["plait-7d9c5b6f4-x2x4x", "plait-69c8d7b5fd-zzzzz"],
            [
                "plait-b-7d9c5b6f4-x2x4x",
                "plait-b-group-0",
                "plait-group-0",
                "plait-group-0-1",
                "a-plait-7d9c5b6f4-x2x4x",
            ],
        ),
        (
            GROUP,
            ["plait-group-0", "plait-group-11", "plait-group-0-1", "plait-group-11-3"],
            ["plait-7d9c5b6f4-x2x4x", "plait-b-group-0", "plait-group-b-group-0", "plait-group-7d9c5b6f4-x2x4x"],
        ),
    ],
    ids=["server", "group"],
)
def test_keda_counts_the_pods_of_its_own_release(values: dict[str, Any], own: list[str], others: list[str]) -> None:
    pattern = pods_that_keda_reads(values)
    assert [pod for pod in own if not pattern.fullmatch(pod)] == []
    assert [pod for pod in others if pattern.fullmatch(pod)] == []
