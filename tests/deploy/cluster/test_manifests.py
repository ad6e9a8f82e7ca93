"""A real API server takes every manifest of the chart, and the real controllers make what it asks for.

`make test-cluster` runs this; it is outside CI.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from plait_testing import budgets
from plait_testing.control_plane import ControlPlane, wait_for
from plait_testing.manifest_schemas import SCHEMAS, write_schemas
from plait_testing.played_cluster import GOLDEN, TOOLS, control_plane, golden

pytestmark = pytest.mark.slow
EXAMPLES = sorted(path.name for path in GOLDEN.glob("*.yaml"))
SERVERS = [name for name in EXAMPLES if any(one["kind"] == "Deployment" for one in golden(name))]
ENFORCED = "pod-security.kubernetes.io/enforce"


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    with control_plane(tmp_path_factory.mktemp("plane")) as one:
        for number in range(2):
            add_node(one, f"node-{number}")
        yield one


def add_node(plane: ControlPlane, name: str) -> None:
    """A ready node with eight GPUs, of which no kubelet tells anything."""
    plane.apply(yaml.safe_dump({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}}))
    amounts = {"cpu": "256", "memory": "4Ti", "pods": "100", "nvidia.com/gpu": "8", "rdma/ib": "8"}
    amounts["ephemeral-storage"] = "4Ti"
    condition = {"type": "Ready", "status": "True", "reason": "Test"}
    plane.patch_status("node", name, {"capacity": amounts, "allocatable": amounts, "conditions": [condition]})
    wait_for(lambda: "taints" not in plane.get("node", name)["spec"], "the node controller's word")


@pytest.fixture
def namespace(plane: ControlPlane, request: pytest.FixtureRequest) -> Iterator[str]:
    """A namespace of its own for a test, whose pods may have no more rights than `restricted` ones."""
    name = f"test-{abs(hash(request.node.name)) % 10**8}"
    plane.kubectl("create", "namespace", name)
    plane.kubectl("label", "namespace", name, f"{ENFORCED}=restricted")
    yield name
    plane.kubectl("delete", "namespace", name, "--wait=false")


def apply(plane: ControlPlane, name: str, namespace: str) -> list[dict[str, Any]]:
    documents = golden(name)
    plane.kubectl(
        "apply",
        "--server-side",
        "--validate=strict",
        f"--namespace={namespace}",
        "--filename=-",
        text=yaml.safe_dump_all(documents),
    )
    return documents


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.acceptance("cluster")
def test_the_api_server_takes_every_manifest(plane: ControlPlane, name: str, namespace: str) -> None:
    for document in apply(plane, name, namespace):
        found = plane.get(document["kind"], document["metadata"]["name"], f"--namespace={namespace}")
        assert found["metadata"]["labels"]["app.kubernetes.io/managed-by"] == "Helm"


@pytest.mark.acceptance("cluster")
def test_the_schemas_of_the_repository_are_the_api_servers(plane: ControlPlane, tmp_path: Path) -> None:
    write_schemas(plane, tmp_path)
    names = [path.name for path in SCHEMAS.iterdir()]
    assert sorted(names) == sorted(path.name for path in tmp_path.iterdir())
    assert [name for name in names if (SCHEMAS / name).read_text() != (tmp_path / name).read_text()] == []


@pytest.mark.acceptance("cluster")
def test_kubeconform_takes_every_manifest() -> None:
    where = f"{SCHEMAS}/{{{{.ResourceKind}}}}-{{{{.ResourceAPIVersion}}}}.json"
    words = ["-strict", "-summary", "-schema-location", where, *map(str, sorted(GOLDEN.glob("*.yaml")))]
    done = subprocess.run([TOOLS / "kubeconform", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert "Invalid: 0, Errors: 0, Skipped: 0" in done.stdout


@pytest.mark.parametrize("name", SERVERS)
@pytest.mark.acceptance("cluster")
def test_pods_are_made_and_bound_to_nodes_with_enough_gpus(plane: ControlPlane, name: str, namespace: str) -> None:
    documents = apply(plane, name, namespace)
    for number in range(2):
        plane.kubectl("label", "node", f"node-{number}", "nvidia.com/gpu.product=NVIDIA-H200", "--overwrite")
    (deployment,) = (one for one in documents if one["kind"] == "Deployment")
    claim_volumes(plane, deployment["spec"]["template"]["spec"]["volumes"], namespace)
    asked = deployment["spec"].get("replicas", 1)
    where = f"--namespace={namespace}"

    def bound() -> bool:
        pods = plane.get("pods", where)
        return len(pods) >= asked and all("nodeName" in pod["spec"] for pod in pods)

    wait_for(bound, "bound pods", lambda: plane.kubectl("get", "events", where))
    (pod, *_) = plane.get("pods", where)
    assert pod["spec"]["containers"][0]["args"] == deployment["spec"]["template"]["spec"]["containers"][0]["args"]


def claim_volumes(plane: ControlPlane, volumes: list[dict[str, Any]], namespace: str) -> None:
    """A bound volume for each claim of a pod."""
    for volume in volumes:
        if "persistentVolumeClaim" not in volume:
            continue
        claim = volume["persistentVolumeClaim"]["claimName"]
        spec: dict[str, Any] = {"accessModes": ["ReadWriteMany"], "storageClassName": ""}
        disk = spec | {"capacity": {"storage": "1Gi"}, "hostPath": {"path": "/nowhere"}}
        disk["claimRef"] = {"namespace": namespace, "name": claim}
        plane.apply(manifest("PersistentVolume", f"{namespace}-{claim}", disk))
        request = spec | {"resources": {"requests": {"storage": "1Gi"}}, "volumeName": f"{namespace}-{claim}"}
        plane.kubectl(
            "create", f"--namespace={namespace}", "--filename=-", text=manifest("PersistentVolumeClaim", claim, request)
        )


def manifest(kind: str, name: str, spec: dict[str, Any]) -> str:
    text: str = yaml.safe_dump({"apiVersion": "v1", "kind": kind, "metadata": {"name": name}, "spec": spec})
    return text


@pytest.mark.acceptance("cluster")
def test_the_disruption_controller_counts_what_the_budget_selects(plane: ControlPlane, namespace: str) -> None:
    apply(plane, "cpu.yaml", namespace)
    where = f"--namespace={namespace}"
    wait_for(
        lambda: plane.get("pdb", "plait", where).get("status", {}).get("expectedPods") == 2,
        "the budget's count",
        lambda: plane.get("pdb", "plait", where),
    )
    assert plane.get("pdb", "plait", where)["status"]["desiredHealthy"] == 1


@pytest.mark.acceptance("cluster")
def test_a_misspelt_field_is_refused_by_name(plane: ControlPlane, namespace: str) -> None:
    text = (GOLDEN / "multi-node.yaml").read_text().replace("restartPolicy: Recreate", "restartPolicyy: Recreate")
    done = plane.try_kubectl(
        "apply", "--server-side", "--validate=strict", f"--namespace={namespace}", "--filename=-", text=text
    )
    assert done.returncode != 0
    assert "restartPolicyy" in done.stderr


@pytest.mark.acceptance("cluster")
def test_helm_installs_upgrades_and_rolls_back(plane: ControlPlane, namespace: str) -> None:
    chart, where = budgets.ROOT / "deploy" / "chart", ["--namespace", namespace, "--kubeconfig", str(plane.kubeconfig)]

    def helm(*words: str) -> str:
        done = subprocess.run([TOOLS / "helm", *words, *where], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def args() -> list[str]:
        deployment = plane.get("deployment", "plait", f"--namespace={namespace}")
        found: list[str] = deployment["spec"]["template"]["spec"]["containers"][0]["args"]
        return found

    values = str(chart / "examples" / "cpu.yaml")
    helm("install", "plait", str(chart), "-f", values)
    before = args()
    helm("upgrade", "plait", str(chart), "-f", values, "--set", "args={--max-seqs=8}")
    assert args() == [*before, "--max-seqs=8"]
    helm("rollback", "plait", "1")
    assert args() == before


@pytest.mark.acceptance("cluster")
def test_a_running_release_keeps_its_servers_when_autoscaling_is_turned_on_as_the_page_says(
    plane: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    chart = budgets.ROOT / "deploy" / "chart"
    page = (budgets.ROOT / "docs" / "deploying.md").read_text()
    (hand_over,) = re.findall(r"^kubectl apply --server-side --field-manager=autoscaling .*$", page, re.MULTILINE)
    values = tmp_path / "values.yaml"
    values.write_text(yaml.safe_dump({"replicas": 3, "autoscaling": {"kind": "none"}}))

    def run(command: str) -> None:
        environment = os.environ | {
            "KUBECONFIG": str(plane.kubeconfig),
            "PATH": f"{TOOLS}:{os.environ['PATH']}",
            "HELM_NAMESPACE": namespace,
        }
        done = subprocess.run(["bash", "-ec", command], env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{command}: {done.stderr}"

    def replicas() -> int:
        return int(plane.get("deployment", "plait", f"--namespace={namespace}")["spec"]["replicas"])

    example = f"{chart} -f {chart}/examples/cpu.yaml"
    run(f"helm install plait {example} -f {values}")
    assert replicas() == 3
    run(hand_over.replace("kubectl apply", f"kubectl apply -n {namespace}").replace('"replicas": 6', '"replicas": 3'))
    run(f"helm upgrade plait {example}")
    assert replicas() == 3
    run(f"helm upgrade plait {example} --set autoscaling.kind=none --set replicas=2 --force-conflicts")
    assert replicas() == 2


def too_many_gpus(container: dict[str, Any]) -> None:
    container["resources"]["limits"]["nvidia.com/gpu"] = 16


def no_claim(container: dict[str, Any]) -> None:
    """The test makes none."""


@pytest.mark.acceptance("cluster")
@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        (too_many_gpus, "Insufficient nvidia.com/gpu"),
        (no_claim, 'persistentvolumeclaim "models" not found'),
    ],
)
def test_what_cannot_run_says_why_in_an_event(
    plane: ControlPlane, namespace: str, mistake: Callable[[dict[str, Any]], None], words: str
) -> None:
    assert words in (budgets.ROOT / "docs" / "deploying.md").read_text()
    documents = golden("tensor-parallel.yaml")
    (deployment,) = (one for one in documents if one["kind"] == "Deployment")
    pod = deployment["spec"]["template"]["spec"]
    pod["nodeSelector"] = {}
    mistake(pod["containers"][0])
    if mistake is not no_claim:
        claim_volumes(plane, pod["volumes"], namespace)
    where = f"--namespace={namespace}"
    plane.kubectl("apply", "--server-side", where, "--filename=-", text=yaml.safe_dump_all(documents))

    def events() -> str:
        return "\n".join(event["message"] for event in plane.get("events", where))

    wait_for(lambda: words in events(), words, events)
