"""Write the JSON schemas of the chart's kinds as the cluster tests' API server serves them, strict: no unknown field.

`PYTHONPATH=tests PLAIT_CLUSTER_TOOLS=DIR python -m plait_testing.manifest_schemas` writes tests/deploy/schemas; DIR is
what tests/deploy/cluster/build_tools.sh made. Descriptions are left out.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from plait_testing.control_plane import ControlPlane, wait_for
from plait_testing.played_cluster import GOLDEN, control_plane, golden

SCHEMAS = GOLDEN.parent / "schemas"
_LEFT_OUT = {"description", "default", "example", "externalDocs", "discriminator"}
Json = dict[str, Any]


def chart_kinds() -> set[tuple[str, str]]:
    """`apiVersion` and `kind` of each manifest of the golden files."""
    return {(one["apiVersion"], one["kind"]) for path in GOLDEN.glob("*.yaml") for one in golden(path.name)}


def load_schema(manifest: Json) -> Json:
    """The committed one of a manifest's kind."""
    found: Json = json.loads((SCHEMAS / file_name(manifest["apiVersion"], manifest["kind"])).read_text())
    return found


def file_name(api_version: str, kind: str) -> str:
    """As kubeconform's template `{{.ResourceKind}}-{{.ResourceAPIVersion}}.json` has it."""
    return f"{kind.lower()}-{api_version.rpartition('/')[2]}.json"


def read_schema(plane: ControlPlane, api_version: str, kind: str) -> Json:
    """Of one kind, with all that it refers to in `definitions`."""
    path = f"apis/{api_version}" if "/" in api_version else f"api/{api_version}"
    group, _, version = api_version.rpartition("/")
    wanted = {"group": group, "kind": kind, "version": version}

    def served() -> Json:
        found = plane.try_kubectl("get", "--raw", f"/openapi/v3/{path}")
        return dict(json.loads(found.stdout)["components"]["schemas"]) if found.returncode == 0 else {}

    def names(schemas: Json) -> list[str]:
        return [name for name, one in schemas.items() if wanted in one.get("x-kubernetes-group-version-kind", [])]

    # A definition that was applied a moment ago is served a moment later.
    wait_for(lambda: names(served()), f"the schema of {kind}")
    (name,) = names(schemas := served())
    definitions: Json = {}
    _add_definitions(name, schemas, definitions)
    schema: Json = definitions.pop(name)
    schema["properties"] |= {"apiVersion": {"const": api_version}, "kind": {"const": kind}}
    schema["required"] = sorted({*schema.get("required", []), "apiVersion", "kind", "metadata"})
    return {"$schema": "http://json-schema.org/draft-07/schema#", **schema, "definitions": definitions}


def _add_definitions(name: str, served: Json, found: Json) -> None:
    """A definition and all that it names, strict."""
    if name in found:
        return
    found[name] = {}
    found[name] = strict(served[name])
    for other in _references(found[name]):
        _add_definitions(other, served, found)


def _references(schema: object) -> Iterator[str]:
    if isinstance(schema, dict):
        for key, value in schema.items():
            if key == "$ref":
                yield value.rpartition("/")[2]
            yield from _references(value)
    elif isinstance(schema, list):
        for one in schema:
            yield from _references(one)


def strict(schema: Any) -> Any:
    """What a validator reads of it, and no field beside those that it names."""
    if isinstance(schema, list):
        return [strict(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return {"$ref": f"#/definitions/{schema['$ref'].rpartition('/')[2]}"}
    if schema.get("x-kubernetes-int-or-string") or schema.get("format") == "int-or-string":
        return {"type": ["integer", "string"]}
    kept = {key: value for key, value in schema.items() if key not in _LEFT_OUT and not key.startswith("x-kubernetes")}
    made = {key: strict(value) for key, value in kept.items() if key != "properties"}
    if "properties" in schema:
        made["properties"] = {name: strict(one) for name, one in schema["properties"].items()}
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            made.setdefault("additionalProperties", False)
    if made.pop("nullable", False) and isinstance(made.get("type"), str):
        made["type"] = [made["type"], "null"]
    return made


def write_schemas(plane: ControlPlane, folder: Path) -> None:
    """One file a kind."""
    for api_version, kind in sorted(chart_kinds()):
        text = json.dumps(read_schema(plane, api_version, kind), separators=(",", ":"), sort_keys=True)
        (folder / file_name(api_version, kind)).write_text(text + "\n")


def main() -> int:
    """Write all; the exit code."""
    SCHEMAS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, control_plane(Path(folder)) as plane:
        write_schemas(plane, SCHEMAS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
