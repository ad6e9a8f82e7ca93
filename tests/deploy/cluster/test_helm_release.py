"""The page's own commands: keys, `helm install`, an upgrade that cannot start, `helm rollback`, under load."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from plait_testing import budgets
from plait_testing.mini_kubelet import Pod
from plait_testing.played_cluster import TOOLS, Cluster, played_cluster
from plait_testing.recording import Record
from plait_testing.service_load import KEY

pytestmark = [pytest.mark.slow, pytest.mark.acceptance("cluster")]
ARGS = "--threads=1,--num-pages,128"
"""Two pods, a client and a control plane share its cores."""


@dataclass(frozen=True)
class Release:
    """What the page's commands are run in: the repository, with this cluster's kubectl and helm."""

    cluster: Cluster
    folder: Path

    def run(self, command: str) -> str:
        environment = os.environ | {
            "KUBECONFIG": str(self.cluster.plane.kubeconfig),
            "PATH": f"{TOOLS}:{os.environ['PATH']}",
        }
        done = subprocess.run(
            ["bash", "-ec", command], cwd=self.folder, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout

    def pods(self) -> list[Pod]:
        return list(self.cluster.kubelet.pods.values())


def line_of_the_page(begin: str) -> str:
    """The one command of docs/deploying.md that begins so."""
    page = (budgets.ROOT / "docs" / "deploying.md").read_text()
    (found,) = re.findall(rf"^{re.escape(begin)}.*$", page, re.MULTILINE)
    assert isinstance(found, str)
    return found


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory, check_models: Path) -> Iterator[Release]:
    """The example without GPUs, installed as the page says, ready."""
    folder = tmp_path_factory.mktemp("repository")
    (folder / "deploy").symlink_to(budgets.ROOT / "deploy")
    with played_cluster(tmp_path_factory, check_models) as cluster:
        one = Release(cluster, folder)
        cluster.plane.kubectl("delete", "secret", "plait-keys")
        one.run(line_of_the_page("umask 077; for client"))
        with (folder / "keys.txt").open("a") as keys:
            keys.write(f"{KEY}\n")
        one.run(line_of_the_page("kubectl create secret generic plait-keys"))
        install = line_of_the_page("helm install plait").replace("one-gpu.yaml", "cpu.yaml")
        assert "cpu.yaml" in install
        one.run(f"{install} --set autoscaling.kind=none --set 'args={{{ARGS}}}'")
        cluster.wait_for(lambda: cluster.serves(2), "two ready pods")
        yield one


def test_a_rollback_ends_an_upgrade_that_cannot_start_and_no_request_fails(release: Release, record: Record) -> None:
    cluster, before = release.cluster, release.pods()
    upgrade = f"helm upgrade plait deploy/chart --reuse-values --set 'args={{{ARGS},--max-num-sequences,4}}'"
    with cluster.load() as asked:
        release.run(upgrade)
        cluster.wait_for(lambda: any("unknown setting" in pod.log for pod in release.pods()), "a start that fails")
        assert any(pod.is_ready for pod in before), "one server of two is left"
        release.run(line_of_the_page("helm rollback plait"))
        cluster.wait_for(lambda: cluster.serves(2), "two servers again")
    assert asked.failed == []
    assert asked.answered > 0
    assert all("--max-num-sequences" not in pod.container["args"] for pod in release.pods())
    case = "an upgrade that cannot start is rolled back under load"
    record(case, "num_answered", "requests", asked.answered)
    record(case, "num_failed", "requests", len(asked.failed), 0)


def test_all_that_the_chart_made_goes_with_it(release: Release) -> None:
    release.run("helm uninstall plait")
    release.cluster.wait_for(lambda: not release.pods(), "the end of the pods")
    kinds = "deployment,service,networkpolicy,poddisruptionbudget,horizontalpodautoscaler"
    assert release.run(f"kubectl get {kinds} --selector app.kubernetes.io/instance=plait --output name") == ""
