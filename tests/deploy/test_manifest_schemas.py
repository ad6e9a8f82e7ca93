"""Rendered manifests beside the API server's own schemas, strict; `make test-cluster` says that these are its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jsonschema
import pytest
from plait_testing.manifest_schemas import SCHEMAS, chart_kinds, file_name, load_schema
from plait_testing.played_cluster import GOLDEN, golden

EXAMPLES = sorted(path.name for path in GOLDEN.glob("*.yaml"))
Json = dict[str, Any]


def faults(manifest: Json) -> list[str]:
    """Where a manifest differs from its kind's schema, and how."""
    found = jsonschema.Draft7Validator(load_schema(manifest)).iter_errors(manifest)
    return [f"{one.json_path}: {one.message}" for one in found]


def of_kind(name: str, kind: str) -> Json:
    (found,) = (one for one in golden(name) if one["kind"] == kind)
    return found


def pod(manifest: Json) -> Json:
    spec = manifest["spec"]
    template: Json = spec["template"] if "template" in spec else spec["leaderWorkerTemplate"]["workerTemplate"]
    return dict(template["spec"])


def test_there_is_a_schema_of_each_kind() -> None:
    assert {path.name for path in SCHEMAS.iterdir()} == {file_name(*one) for one in chart_kinds()}


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_manifest_is_as_its_schema_has_it(name: str) -> None:
    assert [(one["kind"], faults(one)) for one in golden(name)] == [(one["kind"], []) for one in golden(name)]


def misspelt_field(manifest: Json) -> None:
    pod(manifest)["containers"][0]["imagePullPolice"] = "Always"


def word_for_a_number(manifest: Json) -> None:
    pod(manifest)["containers"][0]["startupProbe"]["failureThreshold"] = "many"


def port_without_a_number(manifest: Json) -> None:
    del pod(manifest)["containers"][0]["ports"][0]["containerPort"]


def no_selector(manifest: Json) -> None:
    del manifest["spec"]["selector"]


def group_of_none(manifest: Json) -> None:
    manifest["spec"]["leaderWorkerTemplate"]["size"] = "two"


def unknown_policy(manifest: Json) -> None:
    manifest["spec"]["leaderWorkerTemplate"]["restartPolicy"] = "Always"


@pytest.mark.parametrize(
    ("name", "kind", "mistake", "words"),
    [
        ("one-gpu.yaml", "Deployment", misspelt_field, "imagePullPolice"),
        ("one-gpu.yaml", "Deployment", word_for_a_number, "'many' is not of type 'integer'"),
        ("one-gpu.yaml", "Deployment", port_without_a_number, "'containerPort' is a required property"),
        ("one-gpu.yaml", "Deployment", no_selector, "'selector' is a required property"),
        ("multi-node.yaml", "LeaderWorkerSet", misspelt_field, "imagePullPolice"),
        ("multi-node.yaml", "LeaderWorkerSet", group_of_none, "'two' is not of type 'integer'"),
        ("multi-node.yaml", "LeaderWorkerSet", unknown_policy, "'Always' is not one of"),
    ],
)
def test_a_mistake_in_a_manifest_is_named(name: str, kind: str, mistake: Callable[[Json], None], words: str) -> None:
    manifest = of_kind(name, kind)
    mistake(manifest)
    (fault,) = faults(manifest)
    assert words in fault
