"""A rendered manifest's own command line, probes and preStop, beside a kubelet that is played; no control plane."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from plait_testing import recall
from plait_testing.control_plane import wait_for
from plait_testing.held_steps import HeldSteps
from plait_testing.metrics import parse_metrics, sum_over_replicas
from plait_testing.mini_kubelet import MiniKubelet, Pod, enter_network
from plait_testing.node_network import NodeNetwork, reason_without_namespaces
from plait_testing.played_cluster import add_arguments, golden
from plait_testing.rendered_pods import NAMESPACE, RenderedPods
from plait_testing.service_load import KEY
from plait_testing.service_network import CLIENTS

pytestmark = pytest.mark.process
BODY = {"prompt": "0123 4567", "max_tokens": 16, "ignore_eos": True, "stream": True}
NUM_STREAMS = 2


class Hook:
    """PreStop's sleep: it ends when the test has looked."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.begun, self.may_end = threading.Event(), threading.Event()

    def sleep(self, seconds: float) -> None:
        self.seconds.append(seconds)
        self.begun.set()
        assert self.may_end.wait(120)


@dataclass(frozen=True)
class Played:
    """One pod of the example without GPUs, ready, and clients in a namespace of their own."""

    api: RenderedPods
    kubelet: MiniKubelet
    pod: Pod
    clients: ThreadPoolExecutor
    hook: Hook
    steps: HeldSteps
    url: str

    def ask(self, method: str, path: str, **more: Any) -> Future[httpx.Response]:
        headers = {"Authorization": f"Bearer {KEY}"}
        return self.clients.submit(
            httpx.request, method, f"{self.url}{path}", headers=headers, timeout=120, trust_env=False, **more
        )

    def num_accepted(self) -> float:
        text = self.ask("GET", "/metrics").result().raise_for_status().text
        found = sum_over_replicas(parse_metrics(text))
        return found["plait_requests_running"] + found["plait_requests_waiting"]

    def is_ready(self) -> bool:
        (container,) = self.api.statuses[self.api.paths[0]]["containerStatuses"]
        return bool(container["ready"] and container["restartCount"] == 0)

    def wait_for(self, is_true: Any, what: str) -> None:
        wait_for(is_true, what, lambda: f"{self.kubelet.messages} {self.pod.log[-3000:]}")


@pytest.fixture(scope="module")
def played(check_models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Played]:
    if missing := reason_without_namespaces():
        pytest.skip(missing)
    (deployment,) = (one for one in golden("cpu.yaml") if one["kind"] == "Deployment")
    add_arguments(deployment, "--threads=1", "--num-pages=64")
    api = RenderedPods(deployment, 1, {"plait-keys": {"keys.txt": KEY}})
    hook, steps, folder = Hook(), HeldSteps(tmp_path_factory.mktemp("steps")), tmp_path_factory.mktemp("pods")
    with (
        steps.of_servers(),
        NodeNetwork(2) as network,
        ThreadPoolExecutor(4, initializer=enter_network, initargs=(network, CLIENTS)) as clients,
        MiniKubelet(api, network, NAMESPACE, folder, check_models, hook.sleep) as kubelet,
    ):
        wait_for(lambda: kubelet.pods, "the pod")
        (pod,) = kubelet.pods.values()
        url = f"http://{network.address(pod.node)}:{pod.container['ports'][0]['containerPort']}"
        one = Played(api, kubelet, pod, clients, hook, steps, url)
        one.wait_for(lambda: pod.is_ready, "its readiness")
        yield one
        steps.end()
        hook.may_end.set()


def test_its_own_probes_make_it_ready_and_it_answers_right(played: Played) -> None:
    played.wait_for(played.is_ready, "the word of the kubelet")
    (problem,) = recall.problems(7, 1, 512)
    body = {"model": "recall-gqa", "messages": problem["messages"], "temperature": 0, "max_tokens": 400}
    answer = played.ask("POST", "/v1/chat/completions", json=body).result().raise_for_status().json()
    assert answer["choices"][0]["message"]["content"] == problem["answer"]
    without_a_key = played.clients.submit(httpx.get, f"{played.url}/v1/models", timeout=60, trust_env=False)
    assert without_a_key.result().status_code == httpx.codes.UNAUTHORIZED


def test_a_deleted_pod_still_answers_then_drains_what_it_accepted(played: Played) -> None:
    """Steps are held until SIGTERM: what runs then cannot have ended before."""
    played.api.delete(played.api.paths[0])
    assert played.hook.begun.wait(60)
    played.wait_for(lambda: played.ask("GET", "/ready").result().status_code == httpx.codes.OK, "/ready")
    played.steps.begin(num_decode=1)
    streams = [played.ask("POST", "/v1/completions", json=BODY) for _ in range(NUM_STREAMS)]
    played.wait_for(lambda: played.num_accepted() == NUM_STREAMS, "both streams")
    played.hook.may_end.set()
    played.wait_for(lambda: f"Draining: {NUM_STREAMS} requests in flight" in played.pod.log, "SIGTERM")
    played.steps.end()
    for stream in streams:
        text = stream.result().raise_for_status().text
        assert text.rstrip().endswith("data: [DONE]")
        assert "error" not in text
    played.wait_for(lambda: not played.api.paths, "its end")
    assert played.kubelet.messages == ["plait-0 was deleted and ended with 0"]
    assert played.hook.seconds == [2]
