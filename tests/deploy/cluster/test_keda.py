"""KEDA: its real operator makes the autoscaler from the chart's ScaledObject, which follows what Prometheus scraped."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from plait_testing.keda import PROMETHEUS, keda
from plait_testing.played_cluster import Cluster, add_arguments, played_cluster, render
from plait_testing.recording import Record

pytestmark = [pytest.mark.slow, pytest.mark.acceptance("cluster")]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, check_models: Path) -> Iterator[Cluster]:
    """Two servers of recall-gqa with two seats each, which KEDA may make three."""
    scaling = {"kind": "keda", "minReplicas": 2, "maxReplicas": 3, "waiting": 4, "prometheus": PROMETHEUS}
    scaling["firstTokenSeconds"] = 60  # its rate is over two minutes: a slow machine's would keep the third server
    documents = render("cpu.yaml", {"autoscaling": scaling}, tmp_path_factory.mktemp("values"))
    for one in documents:
        if one["kind"] == "ScaledObject":
            behavior = one["spec"]["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
            behavior["scaleDown"]["stabilizationWindowSeconds"] = 5  # the chart's are ten minutes
        if one["kind"] == "Deployment":
            add_arguments(one, "--threads=1", "--num-pages=128", "--max-seqs=2")
    with played_cluster(tmp_path_factory, check_models) as made, keda(made):
        made.plane.apply(yaml.safe_dump_all(documents))
        made.wait_for(lambda: made.serves(2), "two ready pods")
        yield made


def is_so(found: dict[str, Any], kind: str) -> bool:
    conditions = found.get("status", {}).get("conditions") or []
    return any(one["type"] == kind and one["status"] == "True" for one in conditions)


def autoscaler(cluster: Cluster) -> dict[str, Any]:
    found: dict[str, Any] = cluster.plane.get("hpa", "keda-hpa-plait")
    return found


def test_the_operator_takes_the_scaled_object_and_both_queries_have_values(cluster: Cluster) -> None:
    cluster.wait_for(
        lambda: is_so(cluster.plane.get("scaledobject", "plait"), "Ready"), f"KEDA's word {cluster.plane.log()}"
    )
    cluster.wait_for(lambda: is_so(autoscaler(cluster), "ScalingActive"), "the external metrics")
    spec = autoscaler(cluster)["spec"]
    assert [one["external"]["target"] for one in spec["metrics"]] == [
        {"type": "AverageValue", "averageValue": "4"},
        {"type": "Value", "value": "60"},
    ]


def test_it_scales_by_the_queue_and_back(cluster: Cluster, record: Record) -> None:
    started = time.monotonic()
    with cluster.load(clients=16, num_tokens=128) as asked:
        cluster.wait_for(lambda: autoscaler(cluster)["status"]["desiredReplicas"] == 3, "KEDA's word")
        decided = time.monotonic() - started
        cluster.wait_for(lambda: cluster.serves(3), "a third server")
        served = time.monotonic() - started
    cluster.wait_for(lambda: cluster.serves(2), "two servers again")
    assert asked.failed == []
    case = "KEDA: 16 streams on two servers of two requests each, four may wait for each"
    record(case, "wall_until_decided", "seconds", decided)
    record(case, "wall_until_a_third_is_ready", "seconds", served)
    record(case, "num_failed", "requests", len(asked.failed), 0)
