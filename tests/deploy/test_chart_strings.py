"""Text that the chart takes for a value is a string in the manifests; other text is refused by the value's name."""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from plait_testing.chart import CHART, GOOD, GROUP, needs_helm, refusal, rendered
from plait_testing.manifest_schemas import load_schema

pytestmark = needs_helm
Json = dict[str, Any]
TEXTS = [
    "123",
    "007",
    "1e3",
    "0x1f",
    "true",
    "y",
    "null",
    "~",
    "*x",
    "&x",
    "a: b",
    "a: #b",
    "http://a:",
    "'",
    "12:30",
    "",
]
"""YAML has another meaning for each, or none."""
SCHEMA: Json = json.loads((CHART / "values.schema.json").read_bytes())
EVERYTHING: Json = {
    "image": {"pullSecrets": ["s"]},
    "gpu": {"runtimeClassName": "nvidia"},
    "rdma": {"resource": "rdma/ib"},
    "priorityClassName": "high",
    "cache": {"claim": "cache"},
    "autoscaling": {"kind": "keda"},
    "inferencePool": {"enabled": True, "endpointPicker": "picker"},
    "monitoring": {"podMonitor": True, "keySecret": "k", "withoutKey": True},
    "networkPolicy": {"prometheus": [{"podSelector": {}}]},
}
"""All that the chart can make beside its pods."""
CASES: dict[str, Json] = {
    "hub": GOOD | EVERYTHING,
    "claim": GROUP | EVERYTHING | {"model": {"claim": "models"}},
    "image": GOOD | EVERYTHING | {"model": {"image": "registry.example/models/m:1"}},
}
Path = tuple[str | int, ...]


def found(schema: Json) -> Json:
    """What a reference is to."""
    return SCHEMA["definitions"][schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema


def string_values(schema: Json, path: Path = ()) -> Iterator[tuple[Path, Json]]:
    """Where a value may be a string, and that string's schema; lists of objects are Kubernetes' own."""
    schema = found(schema)
    if schema.get("type") == "string":
        yield path, schema
    elif schema.get("type") == "array" and found(schema["items"]).get("type") == "string":
        yield (*path, 0), found(schema["items"])
    elif schema.get("type") == "object":
        for name, one in schema.get("properties", {}).items():
            yield from string_values(one, (*path, name))
        if isinstance(schema.get("additionalProperties"), dict):
            yield from string_values(schema["additionalProperties"], (*path, "a-key"))


VALUES = [(path, schema) for path, schema in string_values(SCHEMA) if path[0] != "affinity"]


def takes(schema: Json, text: str) -> bool:
    return bool(jsonschema.Draft7Validator(schema).is_valid(text))


def put(values: Json, path: Path, text: str) -> None:
    """Sets one value, and makes the lists and objects that lead to it."""
    place: Any = values
    for step, after in itertools.pairwise(path):
        place = place.setdefault(step, [""] if after == 0 else {})
    place[path[-1]] = text


def is_of(case: str, path: Path) -> bool:
    """A case has one of the model's sources; the hub has no folders and alone a token, a group alone keys of nodes."""
    if path[0] != "model":
        return path[0] != "nodeKeys" or case == "claim"
    without = {"hub": {"path", "claim", "image"}, "claim": {"hub", "image"}, "image": {"hub", "claim"}}[case]
    return path[1] not in without and (path[1] != "hubTokenSecret" or case == "hub")


def faults(manifest: Json) -> list[str]:
    errors = jsonschema.Draft7Validator(load_schema(manifest)).iter_errors(manifest)
    return [f"{manifest['kind']}{one.json_path}: {one.message}" for one in errors]


def test_there_are_values_to_look_at() -> None:
    assert len(VALUES) > 25


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("text", TEXTS)
def test_what_is_taken_is_a_string_in_the_manifests(text: str, case: str) -> None:
    values = copy.deepcopy(CASES[case])
    for path, schema in VALUES:
        if text and is_of(case, path) and takes(schema, text):
            put(values, path, text)
    for manifest in rendered(values).values():
        assert faults(manifest) == []


@pytest.mark.parametrize("text", TEXTS)
def test_what_is_not_taken_is_refused_by_the_values_name(text: str) -> None:
    values, refused = copy.deepcopy(CASES["hub"]), []
    for path, schema in VALUES:
        if not takes(schema, text):
            put(values, path, text)
            refused.append("/".join(map(str, path)))
    assert refused
    said = refusal(values)
    assert [path for path in refused if f"at '/{path}'" not in said] == []


@pytest.mark.parametrize("release", ["123", "1e3", "true", "null"])
def test_a_releases_name_is_a_string(release: str) -> None:
    for manifest in rendered(GOOD | {"fullnameOverride": "plait"}, release=release).values():
        assert faults(manifest) == []
        assert manifest["metadata"]["labels"]["app.kubernetes.io/instance"] == release


@pytest.mark.parametrize("name", [f"{'a' * 39}.b", f"{'a' * 38}--b", f"{'a' * 39}-b"])
def test_a_long_name_ends_as_a_label_must(name: str) -> None:
    (label,) = {
        one["metadata"]["labels"]["app.kubernetes.io/name"] for one in rendered(GOOD | {"nameOverride": name}).values()
    }
    assert label == name[: 39 if name[38] == "a" else 38]
