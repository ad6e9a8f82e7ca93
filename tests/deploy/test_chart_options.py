"""What an operator may add: addresses of IPv6, volumes, labels, annotations, a service account."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import jsonschema
import pytest
from plait.check_settings import check_settings
from plait.cli import build_arg_parsers
from plait.flags import read_settings
from plait.settings import ServeSettings
from plait_testing.chart import (
    CHART,
    GOOD,
    GROUP,
    Json,
    container,
    helm_template,
    needs_helm,
    pod_spec,
    refusal,
    rendered,
)
from plait_testing.manifest_schemas import load_schema

pytestmark = needs_helm
VOLUMES: list[Json] = [
    {"name": "templates", "configMap": {"name": "t", "items": [{"key": "a", "path": "b", "mode": 256}]}},
    {"name": "hash-key", "secret": {"secretName": "s", "defaultMode": 288, "optional": True}},
    {"name": "more", "persistentVolumeClaim": {"claimName": "c", "readOnly": True}},
    {"name": "scratch", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}},
]
MOUNTS: list[Json] = [{"name": one["name"], "mountPath": f"/extra/{one['name']}"} for one in VOLUMES]
MOUNTS[0] |= {"readOnly": True, "subPath": "b"}


def parse_host(args: list[str]) -> str:
    parser, _ = build_arg_parsers()
    settings = read_settings(parser.parse_args(args), ServeSettings)
    check_settings(settings)
    return settings.http.host


@pytest.mark.parametrize(
    ("family", "host", "policy"), [("IPv4", "0.0.0.0", None), ("IPv6", "::", None), ("dual", "::", "PreferDualStack")]
)
def test_a_pod_listens_on_its_families_of_addresses(family: str, host: str, policy: str | None) -> None:
    kinds = rendered(GOOD | {"ipFamily": family})
    assert parse_host(container(kinds)["args"]) == host
    assert kinds["Service"]["spec"].get("ipFamilyPolicy") == policy
    assert f"--host={host}" in container(rendered(GROUP | {"ipFamily": family}))["args"]


def test_another_address_is_refused_with_the_value_to_set() -> None:
    assert "args has --host, which the chart sets itself; set ipFamily instead, which is IPv4" in refusal(
        GOOD | {"args": ["--host=::"]}
    )
    assert "at '/ipFamily'" in refusal(GOOD | {"ipFamily": "ipv6"})


@pytest.mark.parametrize("values", [GOOD, GROUP], ids=["server", "group"])
def test_volumes_are_mounted_beside_the_charts_own(values: Json) -> None:
    kinds = rendered(values | {"extraVolumes": VOLUMES, "extraVolumeMounts": MOUNTS})
    for manifest in kinds.values():
        jsonschema.validate(manifest, load_schema(manifest), jsonschema.Draft7Validator)
    volumes, mounts = pod_spec(kinds)["volumes"], container(kinds)["volumeMounts"]
    assert volumes[-len(VOLUMES) :] == VOLUMES
    assert mounts[-len(MOUNTS) :] == MOUNTS
    plain = rendered(values)
    assert volumes[: -len(VOLUMES)] == pod_spec(plain)["volumes"]
    assert mounts[: -len(MOUNTS)] == container(plain)["volumeMounts"]


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"extraVolumes": [VOLUMES[0] | {"name": "tmp"}]}, "extraVolumes has tmp, and there is a volume of that name"),
        ({"extraVolumes": [VOLUMES[0], VOLUMES[0]]}, "extraVolumes has templates"),
        ({"extraVolumes": [{"name": "host", "hostPath": {"path": "/"}}]}, "'hostPath'"),
        ({"extraVolumes": [{"name": "none"}]}, "at '/extraVolumes/0'"),
        ({"extraVolumes": [{"name": "a", "secret": {"name": "s"}}]}, "at '/extraVolumes/0/secret'"),
        ({"extraVolumeMounts": [MOUNTS[0]]}, "extraVolumes has no volume of that name, but: none"),
        (
            {"extraVolumes": VOLUMES[:1], "extraVolumeMounts": [MOUNTS[0] | {"mountPath": "/models/"}]},
            "where the chart mounts a volume",
        ),
        ({"extraVolumes": VOLUMES[:1], "extraVolumeMounts": MOUNTS[:1] * 2}, "/extra/templates twice"),
        ({"extraVolumeMounts": [{"name": "a", "mountPath": "extra"}]}, "at '/extraVolumeMounts/0/mountPath'"),
    ],
)
def test_volumes_that_cannot_be_mounted_are_refused(values: Json, named: str) -> None:
    assert named in refusal(GOOD | values)


def test_labels_and_annotations_come_beside_the_charts_own() -> None:
    values: dict[str, Any] = {
        "monitoring": {"podMonitor": True, "keySecret": "k", "labels": {"release": "kube-prometheus-stack"}},
        "networkPolicy": {"prometheus": [{"podSelector": {}}]},
        "service": {"annotations": {"example.com/load-balancer-internal": "true"}},
        "podLabels": {"team": "ml"},
    }
    kinds, plain = rendered(GOOD | values), rendered(GOOD)
    own = plain["Service"]["metadata"]["labels"]
    assert kinds["PodMonitor"]["metadata"]["labels"] == own | {"release": "kube-prometheus-stack"}
    assert kinds["Service"]["metadata"]["annotations"] == {"example.com/load-balancer-internal": "true"}
    assert kinds["Deployment"]["spec"]["template"]["metadata"]["labels"] == own | {"team": "ml"}
    assert "annotations" not in plain["Service"]["metadata"]


def test_a_pod_has_the_service_account_and_no_token_of_it() -> None:
    spec = pod_spec(rendered(GOOD | {"serviceAccountName": "plait"}))
    assert spec["serviceAccountName"] == "plait"
    assert spec["automountServiceAccountToken"] is False
    assert "serviceAccountName" not in pod_spec(rendered(GOOD))


@pytest.mark.parametrize(
    ("version", "is_taken"), [("1.30.0", False), ("1.32.9", False), ("1.33.0", True), ("1.36", True)]
)
def test_a_model_in_an_image_needs_a_cluster_that_mounts_images(version: str, is_taken: bool) -> None:
    values = GOOD | {"model": {"image": "registry.example/m:1"}}
    done = helm_template(values, f"--kube-version={version}")
    assert (done.returncode == 0) == is_taken
    assert is_taken or "model.image needs Kubernetes 1.33 or newer, and this is v1.3" in done.stderr
    assert rendered(GOOD, f"--kube-version={version}")


@pytest.mark.parametrize(
    ("scaling", "words"),
    [({}, "on 3 x 1 pod(s)"), ({"kind": "hpa", "minReplicas": 2, "maxReplicas": 6}, "on 2 to 6 x 1 pod(s)")],
)
def test_the_notes_say_how_many_servers_there_will_be(scaling: Json, words: str) -> None:
    values = GOOD | {"replicas": 3, "autoscaling": scaling, "networkPolicy": {"enabled": False}}
    command = ["helm", "install", "plait", str(CHART), "--dry-run=client", "--values=-"]
    done = subprocess.run(command, input=json.dumps(values), capture_output=True, text=True, check=False)
    assert words in done.stdout, done.stderr


def test_who_scales_owns_the_number_of_replicas() -> None:
    """With it in the manifest, each upgrade would undo the autoscaler's, or conflict with it."""
    for values in (GOOD, GROUP):
        more = {"replicas": 3, "networkPolicy": {"enabled": False}}
        for kind in ("none", "hpa", "keda"):
            kinds = rendered(values | more | {"autoscaling": {"kind": kind}})
            workload = kinds.get("Deployment") or kinds["LeaderWorkerSet"]
            assert workload["spec"].get("replicas") == (3 if kind == "none" else None)
