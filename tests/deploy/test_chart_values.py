"""The chart's values: those that can only be wrong are refused by name, the others keep what they say."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import yaml
from plait_testing.chart import CHART, GOOD, container, helm_template, needs_helm, refusal, rendered

pytestmark = needs_helm
KUBERNETES = {".affinity"}
"""Values that have fields of Kubernetes."""


@pytest.mark.parametrize(
    ("shm", "memory", "written"),
    [
        ("8Gi", "64Gi", "64Gi"),
        ("1e+9", "1Gi", "1Gi"),
        ("1Gi", 68719476736, "6.8719476736e+10"),
        (1e9, 1.1e9, "1.1e+09"),
        (1e9, "1.1e9", "1.1e9"),
        ("1Ti", "1Pi", "1Pi"),
        ("500m", "1", "1"),
        ("1k", "1E", "1E"),
    ],
)
def test_quantities_are_compared_as_kubernetes_reads_them(shm: object, memory: object, written: str) -> None:
    one = container(rendered(GOOD | {"shm": shm, "resources": {"memory": memory}}))
    assert one["resources"]["limits"]["memory"] == written


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"model": {"hub": ""}}, "model needs one of hub, claim, image; given: none"),
        ({"model": {"hub": "o/n", "claim": "c"}}, "given: model.hub, model.claim"),
        ({"model": {"hub": "o/n", "path": "x"}}, "model.path"),
        ({"apiKeys": {"secret": ""}}, "kubectl create secret generic plait-keys"),
        ({"args": ["--tp", 3], "parallel": {"tp": 2}}, "args has --tp, which the chart sets itself; set parallel.tp"),
        ({"args": ["--tp=3"], "parallel": {"tp": 2}}, "set parallel.tp instead, which is 2"),
        ({"args": ["--enforce-eager", True]}, "/args/1"),
        ({"resources": {"nvidia.com/gpu": 2}}, "nvidia.com/gpu"),
        ({"parallel": {"dp": 3, "nodes": 2}}, "3 ranks on 2 nodes"),
        ({"parallel": {"tp": 2, "nodes": 2, "dpAttention": True}}, "multiple of parallel.nodes"),
        ({"parallel": {"dp": 2, "nodes": 2}}, "plait keys new DIR --nodes 2"),
        ({"restart": {"policy": "always"}}, "/restart/policy"),
        ({"restart": {"policy": "group"}, "parallel": {"dp": 2, "dpAttention": True}}, "one lost rank ends all"),
        (
            {"restart": {"policy": "group"}, "parallel": {"dp": 2, "nodes": 2}, "nodeKeys": {"secret": "s"}},
            "LeaderWorkerSet makes a group of pods anew",
        ),
        ({"parallel": {"tp": 0}}, "tp"),
        ({"paralel": {"tp": 2}}, "paralel"),
        ({"shm": "8GB"}, "shm"),
        ({"shm": "0"}, "/shm"),
        ({"shm": "0.0Gi"}, "/shm"),
        ({"resources": {"cpu": "0"}}, "/resources/cpu"),
        ({"resources": {"cpu": 0}}, "/resources/cpu"),
        ({"shm": "64Gi"}, "shm is 64Gi, and resources.memory, which it counts within, is 64Gi"),
        ({"resources": {"memory": "8000M"}, "shm": "7800Mi"}, "set a smaller shm or more memory"),
        ({"resources": {"memory": "1e9"}, "shm": "1Gi"}, "shm is 1Gi, and resources.memory"),
        ({"resources": {"memory": "1024Ti"}, "shm": "1Pi"}, "set a smaller shm or more memory"),
        ({"image": {"tag": "a tag"}}, "/image/tag"),
        ({"image": {"repository": "registry.example:5000/plait:1"}}, "/image/repository"),
        ({"image": {"repository": "https://registry.example/plait"}}, "/image/repository"),
        ({"image": {"repository": '"plait"'}}, "/image/repository"),
        ({"model": {"image": "https://registry.example/m:1"}}, "/model/image"),
        ({"args": ["--max-seqs 8"]}, "/args/0"),
        ({"apiKeys": {"secret": "plait-keys", "key": "../keys"}}, "/apiKeys/key"),
        ({"model": {"claim": "c", "path": "a/../../etc"}}, "/model/path"),
        ({"parallel": {"dpAttention": True}}, "parallel.dp is 1"),
        (
            {"parallel": {"dp": 2, "nodes": 2}, "nodeKeys": {"secret": "s"}, "service": {"port": 7451}},
            "service.port is 7451",
        ),
        ({"autoscaling": {"kind": "hpa", "minReplicas": 5}}, "autoscaling.maxReplicas"),
        ({"inferencePool": {"enabled": True}}, "inferencePool.endpointPicker"),
        ({"inferencePool": {"enabled": True, "endpointPicker": "picker"}}, "monitoring.withoutKey: true"),
        ({"monitoring": {"podMonitor": True}}, "monitoring.keySecret"),
        ({"parallel": None}, "'parallel'"),
        ({"drain": {"seconds": None}}, "at '/drain': missing property 'seconds'"),
        ({"shm": None}, "'shm'"),
        ({"env": [{"value": "eth0"}]}, "at '/env/0': missing property 'name'"),
        ({"podLabels": {"stage": 1}}, "/podLabels/stage"),
        ({"podLabels": {"app.kubernetes.io/name": "x"}}, "podLabels has app.kubernetes.io/name"),
        ({"podLabels": {"app.kubernetes.io/version": "x"}}, "podLabels has app.kubernetes.io/version"),
        ({"podLabels": {"helm.sh/chart": "x"}}, "podLabels has helm.sh/chart"),
        ({"monitoring": {"labels": {"helm.sh/chart": "x"}}}, "monitoring.labels has helm.sh/chart"),
        ({"rdma": {"resource": "nvidia.com/gpu"}}, "rdma.resource and gpu.resource are both nvidia.com/gpu"),
        ({"env": [{"name": "A", "value": "1"}, {"name": "A", "value": "2"}]}, "env has A twice; leave one out"),
        (
            {"model": {"hub": "o/n", "hubTokenSecret": "t"}, "env": [{"name": "HF_TOKEN", "value": "x"}]},
            "env has HF_TOKEN, which model.hubTokenSecret sets",
        ),
        (
            {"model": {"claim": "c", "hubTokenSecret": "t"}},
            'model.hubTokenSecret is "t", and the model comes from model.claim',
        ),
        ({"nodeKeys": {"secret": "s"}}, 'nodeKeys.secret is "s", and parallel.nodes is 1'),
        ({"nodeSelector": {"gpu": True}}, "/nodeSelector/gpu"),
        ({"service": {"port": 80}}, "/service/port"),
        ({"fullnameOverride": "a.b"}, "/fullnameOverride"),
    ],
)
def test_bad_values_are_refused_by_name(values: dict[str, Any], named: str) -> None:
    assert named in refusal(GOOD | values)


def test_a_release_whose_name_begins_with_a_digit_needs_another_name() -> None:
    done = helm_template(GOOD, release="1st")
    assert 'the Service would be called "1st-plait"' in done.stderr
    assert "a letter first; set fullnameOverride" in done.stderr


def leaves(values: Any, path: str = "") -> set[str]:
    """Names of values; a map that is empty by default is one."""
    if not isinstance(values, dict) or not values:
        return {path}
    return {name for key, value in values.items() for name in leaves(value, f"{path}.{key}")}


def allowed(schema: dict[str, Any], path: str = "") -> set[str]:
    """Names of values that the schema has."""
    properties = schema.get("properties", {}) if path.count(".") < 2 and path not in KUBERNETES else {}
    names = {name for key, one in properties.items() for name in allowed(one, f"{path}.{key}")}
    return names or {path}


def test_each_value_is_in_the_schema_and_a_template_uses_it() -> None:
    given = leaves(yaml.safe_load((CHART / "values.yaml").read_text()))
    assert allowed(json.loads((CHART / "values.schema.json").read_bytes())) - {".global"} == given
    templates = "".join(path.read_text() for path in (CHART / "templates").iterdir())
    assert [name for name in sorted(given) if not re.search(rf"{re.escape(name)}\b", templates)] == []
