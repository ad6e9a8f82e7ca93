"""Schemas of real programs: which ones compile, how fast, and whether all that random walks write validates.

The schemas are those of Kubernetes in the package `kubernetes-validate` (each with the definitions that it reaches,
without descriptions) and those that `check-jsonschema` carries. The checker is an example of plait-grammar.

    python tests/bench/grammar/real_schemas.py CHECKER --out FILE    # in an environment with both packages
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import statistics
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema

NUM_WALKS = 3


def folder(package: str) -> Path:
    found = importlib.util.find_spec(package)
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parent


def walk(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from walk(inner)


def without_descriptions(value: Any) -> Any:
    if isinstance(value, list):
        return [without_descriptions(one) for one in value]
    if not isinstance(value, dict):
        return value
    is_annotation = isinstance(value.get("description"), str)
    return {
        name: without_descriptions(one) for name, one in value.items() if not (is_annotation and name == "description")
    }


def kubernetes(num: int) -> Iterator[tuple[str, Any]]:
    """A sample of the newest version's objects."""
    versions = sorted((folder("kubernetes_validate") / "kubernetes-json-schema").glob("v*-local"))
    newest = max(versions, key=lambda path: [int(part) for part in path.name[1:].split("-")[0].split(".")])
    definitions = without_descriptions(json.loads((newest / "_definitions.json").read_text()))["$defs"]
    names = sorted(definitions)
    random.Random(7).shuffle(names)
    for name in names[:num]:
        reached, open_names = set[str](), [name]
        while open_names:
            one = open_names.pop()
            if one not in reached:
                reached.add(one)
                refs = (part.get("$ref", "") for part in walk(definitions[one]))
                open_names += [str(ref).rpartition("/")[2] for ref in refs if isinstance(ref, str) and ref]
        bundled = {one: definitions[one] for one in sorted(reached)}
        yield f"kubernetes/{name}", {"$ref": f"#/$defs/{name}", "$defs": bundled}


def builtin() -> Iterator[tuple[str, Any]]:
    for path in sorted(folder("check_jsonschema").rglob("*.json")):
        yield f"check-jsonschema/{path.stem}", json.loads(path.read_text())


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else 0.0


def problem(schema: Any, text: str) -> str | None:
    """Why a walk's text does not validate."""
    try:
        jsonschema.validators.validator_for(schema)(schema).validate(json.loads(text))
    except jsonschema.ValidationError as error:
        return f"{error.message[:120]} in {text[:200]}"
    except json.JSONDecodeError as error:
        return f"{error} in {text[:200]}"
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checker", type=Path)
    parser.add_argument("--num", type=int, default=400, help="of Kubernetes' schemas")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    named = [*kubernetes(args.num), *builtin()]
    lines = "\n".join(json.dumps({"schema": schema, "num_walks": NUM_WALKS}) for _, schema in named)
    done = subprocess.run([args.checker], input=lines, text=True, stdout=subprocess.PIPE, check=True)
    said = [json.loads(line) for line in done.stdout.splitlines()]
    refused = {name: one["error"] for (name, _), one in zip(named, said, strict=True) if "error" in one}
    compiled = [one["seconds"] for one in said if "error" not in one]
    walks = [
        (name, schema, text)
        for (name, schema), one in zip(named, said, strict=True)
        for text in one.get("walks", [])
        if text is not None
    ]
    wrong = [f"{name}: {why}" for name, schema, text in walks if (why := problem(schema, text))]
    masks = [seconds for one in said for seconds in one.get("mask_seconds", [])]
    report = {
        "schemas": len(named),
        "compiled": len(compiled),
        "compile_seconds": {
            "p50": statistics.median(compiled),
            "p99": percentile(compiled, 0.99),
            "max": max(compiled),
        },
        "mask_seconds": {"p50": statistics.median(masks), "p99": percentile(masks, 0.99), "max": max(masks)},
        "walks_ended": len(walks),
        "walks_wrong": wrong,
        "refused": refused,
    }
    print(json.dumps(report, indent=1))
    if args.out:
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
