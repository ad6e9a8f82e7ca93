"""The demo model, SmolLM2-135M, in pods of the chart: it answers in words, through an upgrade and a deleted pod."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import yaml
from plait_testing.control_plane import ControlPlane
from plait_testing.mini_kubelet import enter_network
from plait_testing.played_cluster import Cluster, add_arguments, played_cluster, render
from plait_testing.recording import Record
from plait_testing.service_load import KEY
from plait_testing.service_network import CLIENTS

pytestmark = [pytest.mark.slow, pytest.mark.acceptance("cluster")]
NUM_QUESTIONS = 6


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, demo_gguf: Path) -> Iterator[Cluster]:
    """Two servers of the file behind a Service, ready; the claim of models is the folder that it lies in."""
    with played_cluster(tmp_path_factory, demo_gguf.parent) as made:
        apply_servers(made.plane, demo_gguf, tmp_path_factory.mktemp("values"))
        made.wait_for(lambda: made.serves(2), "two ready pods")
        yield made


def apply_servers(plane: ControlPlane, model: Path, folder: Path, *more_args: str) -> None:
    values: dict[str, object] = {
        "model": {"claim": "models", "path": model.name, "servedName": "smollm2"},
        "autoscaling": {"kind": "none"},
    }
    documents = render("cpu.yaml", values, folder)
    for one in documents:
        if one["kind"] == "Deployment":
            add_arguments(one, "--threads=1", "--num-pages=64", *more_args)
    plane.apply(yaml.safe_dump_all(documents))


def answers(cluster: Cluster) -> list[str]:
    """Each question on a connection of its own, so that any pod is asked."""
    question = {"role": "user", "content": "What is the capital of France? Answer in one sentence."}
    body = {"model": "smollm2", "messages": [question], "temperature": 0, "max_tokens": 24}
    url, headers = f"{cluster.url}/v1/chat/completions", {"Authorization": f"Bearer {KEY}"}

    def ask(_: int) -> str:
        cluster.wait_for(cluster.ready, "a pod behind the Service")
        done = httpx.post(url, json=body, headers=headers, timeout=120, trust_env=False).raise_for_status()
        return str(done.json()["choices"][0]["message"]["content"])

    with ThreadPoolExecutor(1, initializer=enter_network, initargs=(cluster.network, CLIENTS)) as pool:
        return list(pool.map(ask, range(NUM_QUESTIONS)))


def test_both_servers_give_the_same_answer_in_words(cluster: Cluster) -> None:
    given = answers(cluster)
    assert "Paris" in given[0]
    assert set(given) == {given[0]}


def test_an_upgrade_and_a_deleted_pod_under_load_fail_no_request(
    cluster: Cluster, demo_gguf: Path, tmp_path: Path, record: Record
) -> None:
    kubelet = cluster.kubelet
    before, started = set(kubelet.pods), time.monotonic()
    with cluster.load() as asked:
        apply_servers(cluster.plane, demo_gguf, tmp_path, "--max-seqs=8")
        cluster.wait_for(lambda: not before & set(kubelet.pods) and cluster.serves(2), "the upgrade")
        seconds = time.monotonic() - started
        gone = next(iter(kubelet.pods.values()))
        cluster.plane.kubectl("delete", "pod", gone.name, "--wait=false")
        cluster.wait_for(lambda: gone in kubelet.ended and cluster.serves(2), "a new pod")
    case = "SmolLM2: upgrade of two servers under load, then a pod is deleted"
    record(case, "wall_of_upgrade", "seconds", seconds)
    record(case, "num_answered", "requests", asked.answered)
    record(case, "num_failed", "requests", len(asked.failed), 0)
    assert asked.failed == []
    assert asked.answered > 0
    assert "Paris" in answers(cluster)[0]
