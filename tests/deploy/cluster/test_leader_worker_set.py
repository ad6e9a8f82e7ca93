"""Groups of pods: the real controller of LeaderWorkerSet makes them, their own commands form groups and serve."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest
import yaml
from plait import cli
from plait_testing import recall
from plait_testing.control_plane import ControlPlane
from plait_testing.lws_controller import start_lws_controller
from plait_testing.mini_kubelet import Pod, enter_network
from plait_testing.played_cluster import Cluster, add_arguments, golden, played_cluster, render
from plait_testing.recording import Record
from plait_testing.service_load import KEY
from plait_testing.service_network import CLIENTS

pytestmark = [pytest.mark.slow, pytest.mark.acceptance("cluster")]
GROUP = "leaderworkerset.sigs.k8s.io/group-index"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, check_models: Path) -> Iterator[Cluster]:
    """The example of groups on CPUs: two of two pods, which share the experts of recall-mla, ready."""
    with played_cluster(tmp_path_factory, check_models) as made:
        start_lws_controller(made.plane)
        make_node_keys(made.plane, tmp_path_factory.mktemp("keys"))
        apply_groups(made.plane)
        made.wait_for(lambda: made.serves(4), "four ready pods")
        yield made


def make_node_keys(plane: ControlPlane, folder: Path) -> None:
    """As the chart says to."""
    assert cli.run(["keys", "new", str(folder / "keys"), "--nodes", "2"]) == 0
    plane.kubectl("create", "secret", "generic", "plait-node-keys", f"--from-file={folder / 'keys'}")


def apply_groups(plane: ControlPlane, *more_args: str, replicas: int = 2) -> None:
    documents = golden("cpu-group.yaml")
    for one in documents:
        if one["kind"] == "LeaderWorkerSet":
            one["spec"]["replicas"] = replicas
            # Four pods, a client and a control plane share this machine's cores.
            add_arguments(one, "--threads=1", "--num-pages=128", *more_args)
    plane.apply(yaml.safe_dump_all(documents))


def group_of(pod: Pod) -> str:
    return str(pod.manifest["metadata"]["labels"][GROUP])


def pods_of(cluster: Cluster, group: str) -> list[Pod]:
    return [pod for pod in cluster.kubelet.pods.values() if group_of(pod) == group]


def environment(pod: Pod) -> dict[str, str]:
    return {one["name"]: one.get("value", "") for one in pod.container["env"]}


def test_the_controller_gives_each_pod_its_place_and_the_nodes_meet(cluster: Cluster) -> None:
    for group in ("0", "1"):
        pods = {environment(pod)["LWS_WORKER_INDEX"]: pod for pod in pods_of(cluster, group)}
        assert sorted(pods) == ["0", "1"]
        for pod in pods.values():
            assert environment(pod)["LWS_LEADER_ADDRESS"] == f"plait-group-{group}.plait-group.default"
            assert environment(pod)["LWS_GROUP_SIZE"] == "2"
            assert {path.name for path in (pod.folder / "node-keys").iterdir()} == {
                "public.keys",
                f"node-{environment(pod)['LWS_WORKER_INDEX']}.key",
            }
        assert "Preflight of 2 nodes" in pods["0"].log
        assert "FAIL" not in pods["0"].log


def test_a_group_answers_right_through_the_services_address(cluster: Cluster) -> None:
    assert ask_recall(cluster, 8) == []


def ask_recall(cluster: Cluster, num: int) -> list[str]:
    """Each on a connection of its own, so that any pod is asked; the wrong answers."""
    problems, headers = recall.problems(7, num, 512), {"Authorization": f"Bearer {KEY}"}
    url = cluster.url  # the API server is not in the clients' network

    def ask(problem: recall.Problem) -> str:
        cluster.wait_for(cluster.ready, "a pod behind the Service")
        with httpx.Client(base_url=url, headers=headers, timeout=120, trust_env=False) as client:
            return recall.ask(client, problem, "recall-mla")

    with ThreadPoolExecutor(1, initializer=enter_network, initargs=(cluster.network, CLIENTS)) as pool:
        answers = list(pool.map(ask, problems))
    return [answer for answer, problem in zip(answers, problems, strict=True) if answer != problem["answer"]]


def test_an_upgrade_under_load_replaces_group_by_group_and_fails_no_request(cluster: Cluster, record: Record) -> None:
    kubelet = cluster.kubelet
    before, started = set(kubelet.pods), time.monotonic()
    with cluster.load() as asked:
        apply_groups(cluster.plane, "--max-seqs=8")
        cluster.wait_for(lambda: not before & set(kubelet.pods), "the end of the old pods")
        cluster.wait_for(lambda: cluster.serves(4), "the new pods")
        seconds = time.monotonic() - started
    case = "upgrade of two groups of two pods under load"
    record(case, "wall", "seconds", seconds)
    record(case, "num_answered", "requests", asked.answered)
    record(case, "num_failed", "requests", len(asked.failed), 0)
    assert asked.failed == []
    assert asked.answered > 20
    assert all("--max-seqs=8" in pod.container["args"] for pod in kubelet.pods.values())


def test_a_killed_rank_ends_its_group_which_is_made_anew_while_the_other_serves(
    cluster: Cluster, record: Record
) -> None:
    victims, others = pods_of(cluster, "1"), pods_of(cluster, "0")
    started = time.monotonic()
    rank_of(victims[-1]).kill()
    cluster.wait_for(lambda: all(pod in cluster.kubelet.ended for pod in victims), "the end of the group")
    cluster.wait_for(lambda: cluster.serves(4), "the new group")
    record("a rank of one of two groups is killed", "wall_until_ready", "seconds", time.monotonic() - started)
    assert pods_of(cluster, "0") == others
    assert [pod.restarts for pod in others] == [0, 0]
    assert len(pods_of(cluster, "1")) == 2
    assert not set(map(id, victims)) & set(map(id, pods_of(cluster, "1")))
    assert any("was killed by SIGKILL" in pod.log for pod in victims)
    assert ask_recall(cluster, 4) == []


def rank_of(pod: Pod) -> psutil.Process:
    assert pod.process is not None
    processes = psutil.Process(pod.process.pid).children(recursive=True)
    return next(process for process in processes if "plait_worker" in process.cmdline())


def test_a_group_that_is_scaled_away_drains_under_load(cluster: Cluster, record: Record) -> None:
    going = pods_of(cluster, "1")
    with cluster.load() as asked:
        cluster.plane.kubectl("scale", "lws", "plait-group", "--replicas=1")
        cluster.wait_for(lambda: all(pod in cluster.kubelet.ended for pod in going), "the end of the group")
    case = "a group of two is scaled away under load"
    record(case, "num_answered", "requests", asked.answered)
    record(case, "num_failed", "requests", len(asked.failed), 0)
    assert asked.failed == []
    assert asked.answered > 0
    # The group drains as one: the other pod's command may end before the pod itself is deleted.
    ended = [f"{pod.name} {how}ended with 0" for pod in going for how in ("", "was deleted and ")]
    assert len({line.split()[0] for line in cluster.kubelet.messages if line in ended}) == 2


def test_a_replica_over_two_pods_serves_at_its_leader_and_is_made_anew(
    cluster: Cluster, tmp_path: Path, record: Record
) -> None:
    """Tensor parallelism between pods. After all others: the groups before it are gone."""
    cluster.plane.kubectl("delete", "lws", "plait-group", "--wait=false")
    cluster.wait_for(lambda: not cluster.kubelet.pods, "the end of the other groups")
    values = {"parallel": {"nodes": 2, "tp": 2, "dp": 1, "dpAttention": False}, "replicas": 1}
    documents = render("cpu-group.yaml", values, tmp_path)
    for one in documents:
        if one["kind"] == "LeaderWorkerSet":
            pods = one["spec"]["leaderWorkerTemplate"]
            for role in ("leaderTemplate", "workerTemplate"):
                pods[role]["spec"]["containers"][0]["args"] += ["--threads=1", "--num-pages=128"]
    started = time.monotonic()
    cluster.plane.kubectl(
        "apply", "--server-side", "--force-conflicts", "--filename=-", text=yaml.safe_dump_all(documents)
    )
    cluster.wait_for(lambda: cluster.serves(1), "the leader")
    record("a replica over two pods", "wall_until_ready", "seconds", time.monotonic() - started)
    assert ask_recall(cluster, 4) == []
    pods = pods_of(cluster, "0")
    assert [environment(pod)["LWS_WORKER_INDEX"] for pod in pods if pod.is_ready] in (["0", "1"], ["1", "0"])
    victim = next(pod for pod in pods if environment(pod)["LWS_WORKER_INDEX"] == "1")
    rank_of(victim).kill()
    cluster.wait_for(lambda: all(pod in cluster.kubelet.ended for pod in pods), "the end of the group")
    cluster.wait_for(lambda: cluster.serves(1), "the new leader")
    assert ask_recall(cluster, 4) == []
