"""Helm renders the chart with given values: what the tests of its values share."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from typing import Any

import pytest
import yaml

from plait_testing import budgets

CHART = budgets.ROOT / "deploy" / "chart"
GOOD: dict[str, Any] = {"model": {"hub": "o/n"}, "apiKeys": {"secret": "plait-keys"}}
"""As few values as the chart takes."""
GROUP: dict[str, Any] = GOOD | {"parallel": {"dp": 2, "nodes": 2}, "nodeKeys": {"secret": "plait-node-keys"}}
"""Of a group of two pods with an engine each."""
needs_helm = pytest.mark.skipif(
    shutil.which("helm") is None, reason="no helm; tests/deploy/cluster/README.md builds it"
)
Json = dict[str, Any]


class ManifestLoader(yaml.SafeLoader):  # type: ignore[misc]
    """Reads words as Kubernetes does: PyYAML alone takes `y` and `1e3` for strings."""


ManifestLoader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"^[yYnN]$"), list("yYnN"))
ManifestLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9]+[eE][-+]?[0-9]+$"), list("-+0123456789")
)
ManifestLoader.bool_values = yaml.SafeLoader.bool_values | {"y": True, "n": False}


def helm_template(values: Json, *words: str, release: str = "plait") -> subprocess.CompletedProcess[str]:
    """`helm template` with these values, and further words of its command line."""
    command = ["helm", "template", release, str(CHART), "--namespace=default", "--values=-", *words]
    return subprocess.run(command, input=json.dumps(values), capture_output=True, text=True, check=False)


def rendered(values: Json, *words: str, release: str = "plait") -> dict[str, Json]:
    """The manifests, by kind."""
    done = helm_template(values, *words, release=release)
    assert done.returncode == 0, done.stderr
    return {one["kind"]: one for one in yaml.load_all(done.stdout, ManifestLoader) if one is not None}


def refusal(values: Json, *words: str) -> str:
    """What helm says of values that are refused."""
    done = helm_template(values, *words)
    assert done.returncode != 0, "it was rendered"
    return done.stderr


def pod_spec(kinds: dict[str, Json]) -> Json:
    """Of the pods that serve."""
    if "Deployment" in kinds:
        spec: Json = kinds["Deployment"]["spec"]["template"]["spec"]
        return spec
    group = kinds["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]
    found: Json = group.get("leaderTemplate", group["workerTemplate"])["spec"]
    return found


def container(kinds: dict[str, Json]) -> Json:
    """The server's."""
    (one,) = pod_spec(kinds)["containers"]
    found: Json = one
    return found
