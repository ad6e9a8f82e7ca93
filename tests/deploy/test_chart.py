"""The chart: its rendered manifests agree with the command line they run."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from plait.check_settings import check_settings
from plait.cli import build_arg_parsers
from plait.flags import read_settings, reject_unknown
from plait.nodes.settings import LaunchSettings
from plait.settings import ServeSettings
from plait_testing import budgets
from plait_testing.chart import CHART, needs_helm

GOLDEN = budgets.ROOT / "tests" / "deploy" / "golden"
EXAMPLES = sorted(path.name for path in (CHART / "examples").glob("*.yaml"))
LEADER = {"leaderworkerset.sigs.k8s.io/worker-index": "0"}
"""The label that LeaderWorkerSet gives the first pod of a group."""
UNITS = {"Mi": 1 << 20, "Gi": 1 << 30}


def renderer() -> ModuleType:
    spec = importlib.util.spec_from_file_location("render_chart", budgets.ROOT / "tools/render_chart.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["render_chart"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def manifests(name: str) -> dict[str, dict[str, Any]]:
    """Of an example, by kind."""
    documents = yaml.safe_load_all((GOLDEN / name).read_text())
    return {document["kind"]: document for document in documents if document is not None}


def template(name: str) -> dict[str, Any]:
    """The template of an example's pods that serve."""
    kinds = manifests(name)
    if "Deployment" in kinds:
        pod: dict[str, Any] = kinds["Deployment"]["spec"]["template"]
        return pod
    group: dict[str, dict[str, Any]] = kinds["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]
    return group.get("leaderTemplate", group["workerTemplate"])


def container(name: str) -> dict[str, Any]:
    (one,) = template(name)["spec"]["containers"]
    found: dict[str, Any] = one
    return found


def read_command(args: list[str]) -> tuple[str, ServeSettings | LaunchSettings]:
    """MODEL and the settings, as the command line reads them."""
    parser, commands = build_arg_parsers()
    parsed, unknown = parser.parse_known_args(args)
    reject_unknown(commands[parsed.command], unknown)
    if parsed.command == "launch":
        return parsed.model, read_settings(parsed, LaunchSettings)
    settings = read_settings(parsed, ServeSettings)
    check_settings(settings)
    return parsed.model, settings


def num_bytes(quantity: str) -> int:
    return int(quantity[:-2]) * UNITS[quantity[-2:]]


def pods_of(name: str) -> Iterator[dict[str, Any]]:
    spec = template(name)["spec"]
    yield from spec["containers"]
    yield from spec.get("initContainers", [])


def test_there_is_a_golden_file_for_each_example() -> None:
    assert sorted(path.name for path in GOLDEN.iterdir()) == EXAMPLES


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_golden_file_is_of_this_chart(name: str) -> None:
    first = (GOLDEN / name).read_text().splitlines(keepends=True)[0]
    assert first == renderer().head(CHART / "examples" / name), "run `python tools/render_chart.py` (needs helm)"


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_pod_runs_a_command_line_that_plait_reads(name: str) -> None:
    one = container(name)
    args = [word.replace("$(LWS_LEADER_ADDRESS)", "plait-group-0.plait-group.default") for word in one["args"]]
    model, settings = read_command(args)
    assert model
    mounts = [mount["mountPath"] for mount in one["volumeMounts"]]
    assert settings.http.api_key_file is not None
    assert str(Path(settings.http.api_key_file).parent) in mounts
    assert {"name": "http", "containerPort": settings.http.port} in one["ports"]
    assert settings.http.host == "0.0.0.0"
    if model.startswith("/"):
        assert "/models" in mounts
    if isinstance(settings, LaunchSettings):
        assert settings.nodes.keys in mounts
        assert {"name": "launch", "containerPort": int(str(settings.nodes.head).split(":")[1])} in one["ports"]


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_pod_asks_for_as_many_gpus_as_it_has_ranks(name: str) -> None:
    _, settings = read_command(container(name)["args"])
    kinds = manifests(name)
    group = kinds["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]["size"] if "LeaderWorkerSet" in kinds else 1
    ranks = settings.process.tp * settings.process.dp
    limits = container(name)["resources"]["limits"]
    assert limits.get("nvidia.com/gpu", 0) * group == (0 if settings.device.device == "cpu" else ranks)


@pytest.mark.parametrize("name", EXAMPLES)
def test_probes_ask_as_the_operating_page_says(name: str) -> None:
    one = container(name)
    _, settings = read_command(one["args"])
    paths = {kind: one[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "readiness", "liveness")}
    assert paths == {"startup": "/ready", "readiness": "/ready", "liveness": "/health"}
    startup, liveness = one["startupProbe"], one["livenessProbe"]
    longest = settings.process.load_timeout_seconds
    if isinstance(settings, LaunchSettings):
        longest += settings.nodes.meet_timeout_seconds + settings.nodes.preflight_timeout_seconds
    assert startup["periodSeconds"] * startup["failureThreshold"] > longest
    allowed = liveness["periodSeconds"] * liveness["failureThreshold"]
    assert allowed > 60, "the server gives up by itself first"
    if isinstance(settings, ServeSettings) and settings.restarts.restart != "never":
        assert allowed > settings.process.load_timeout_seconds, "/health is red while lost ranks load again"
    page = (budgets.ROOT / "docs" / "operating.md").read_text()
    assert all(f"| `{path}` | no |" in page for path in paths.values()), "a probe has no key"


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_pod_still_answers_while_it_is_forgotten_and_then_drains(name: str) -> None:
    spec = template(name)["spec"]
    one = container(name)
    _, settings = read_command(one["args"])
    by_hook = one.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
    announce = by_hook + settings.http.shutdown_delay_seconds
    assert not by_hook or not settings.http.shutdown_delay_seconds, "they would add up"
    readiness = container(name)["readinessProbe"]
    assert announce > 0
    assert spec["terminationGracePeriodSeconds"] > announce
    assert readiness["periodSeconds"] * readiness["failureThreshold"] <= 5


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_pod_has_no_rights_that_it_does_not_need(name: str) -> None:
    spec = template(name)["spec"]
    assert spec["automountServiceAccountToken"] is False
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec)
    assert not any("hostPath" in volume for volume in spec["volumes"])
    for one in pods_of(name):
        context = one["securityContext"]
        assert context["allowPrivilegeEscalation"] is False
        assert context["readOnlyRootFilesystem"] is True
        assert context["capabilities"] == {"drop": ["ALL"]}, "users other than root get no ambient ones"
        assert "memory" in one["resources"]["limits"]


@pytest.mark.parametrize("name", EXAMPLES)
def test_shared_memory_is_within_the_memory(name: str) -> None:
    volumes = {volume["name"]: volume for volume in template(name)["spec"]["volumes"]}
    shm = volumes["shm"]["emptyDir"]
    assert shm["medium"] == "Memory"
    assert num_bytes(shm["sizeLimit"]) < num_bytes(container(name)["resources"]["limits"]["memory"])


@pytest.mark.parametrize("name", EXAMPLES)
def test_whatever_selects_pods_selects_these(name: str) -> None:
    kinds = manifests(name)
    labels = (template(name)["metadata"]["labels"] | LEADER).items()
    selectors = [kinds["Service"]["spec"]["selector"], kinds["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"]]
    for kind in ("Deployment", "PodDisruptionBudget", "PodMonitor", "InferencePool"):
        if kind in kinds:
            selectors.append(kinds[kind]["spec"]["selector"]["matchLabels"])
    assert all(selector and selector.items() <= labels for selector in selectors)


@pytest.mark.parametrize("name", ["multi-node.yaml", "cpu-group.yaml"])
def test_the_name_of_a_set_is_left_to_the_headless_service_that_its_controller_makes(name: str) -> None:
    kinds = manifests(name)
    assert kinds["LeaderWorkerSet"]["metadata"]["name"] != kinds["Service"]["metadata"]["name"]


def test_of_a_replica_over_several_nodes_the_leader_alone_serves() -> None:
    kinds = manifests("tensor-parallel-nodes.yaml")
    pods = kinds["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]
    leader, worker = (pods[f"{role}Template"]["spec"]["containers"][0] for role in ("leader", "worker"))
    probes = {"startupProbe", "readinessProbe", "livenessProbe"}
    assert probes <= set(leader)
    assert worker == {name: value for name, value in leader.items() if name not in probes}
    assert LEADER.items() <= kinds["Service"]["spec"]["selector"].items()
    others = manifests("multi-node.yaml")
    assert "leaderTemplate" not in others["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]
    assert not LEADER.keys() & others["Service"]["spec"]["selector"].keys()


def test_a_group_is_evicted_as_a_whole() -> None:
    kinds = manifests("multi-node.yaml")
    spec = kinds["LeaderWorkerSet"]["spec"]
    size = spec["leaderWorkerTemplate"]["size"]
    assert kinds["PodDisruptionBudget"]["spec"]["minAvailable"] == (spec["replicas"] - 1) * size
    assert spec["leaderWorkerTemplate"]["restartPolicy"] == "RecreateGroupOnPodRestart"


@pytest.mark.parametrize("name", ["cpu.yaml", "replicas.yaml"])
def test_what_scales_names_the_workload_and_metrics_that_exist(name: str) -> None:
    kinds = manifests(name)
    scaler = kinds.get("HorizontalPodAutoscaler") or kinds["ScaledObject"]
    workload = kinds["Deployment"]
    target = scaler["spec"]["scaleTargetRef"]
    assert (target["kind"], target["name"]) == (workload["kind"], workload["metadata"]["name"])
    assert "replicas" not in workload["spec"], "the scaler sets them"
    known = (budgets.ROOT / "docs" / "metrics.md").read_text()
    metrics = set(re.findall(r"plait_\w+", json.dumps(scaler["spec"])))
    assert metrics
    assert all(f"`{metric.removesuffix('_bucket')}`" in known for metric in metrics)


@pytest.mark.parametrize("name", ["replicas.yaml", "tensor-parallel.yaml"])
def test_prometheus_knows_a_pod_by_its_name(name: str) -> None:
    """A pod made anew has another address, and counters of another `instance` would begin as new ones."""
    (endpoint,) = manifests(name)["PodMonitor"]["spec"]["podMetricsEndpoints"]
    rules = {rule["targetLabel"]: rule for rule in endpoint["relabelings"]}
    assert rules["instance"]["sourceLabels"] == ["__meta_kubernetes_pod_name"]
    assert rules["job"]["replacement"] == "plait/default/plait"


def test_the_endpoint_picker_reads_gauges_that_exist_without_a_key() -> None:
    (pool,) = [name for name in EXAMPLES if "InferencePool" in manifests(name)]
    _, settings = read_command(container(pool)["args"])
    assert settings.http.metrics_without_key
    config = yaml.safe_load((budgets.ROOT / "deploy/gateway/endpoint-picker.yaml").read_text())
    (extractor,) = [one["parameters"] for one in config["plugins"] if one["type"] == "core-metrics-extractor"]
    (engine,) = extractor["engineConfigs"]
    assert extractor["defaultEngine"] == engine["name"]
    known = (budgets.ROOT / "docs" / "metrics.md").read_text()
    assert all(f"| `{engine[name]}` | gauge |" in known for name in engine if name.endswith("Spec"))


@needs_helm
@pytest.mark.parametrize("name", EXAMPLES)
def test_helm_renders_the_golden_file(name: str) -> None:
    example = CHART / "examples" / name
    assert renderer().golden_text(example) == (GOLDEN / name).read_text()
    done = subprocess.run(["helm", "lint", "--strict", str(CHART), "-f", str(example)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
