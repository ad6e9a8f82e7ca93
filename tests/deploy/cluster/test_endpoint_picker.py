"""An InferencePool: the real endpoint picker reads the pods' gauges, and sends requests to the pod that is free."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml
from plait_testing.endpoint_picker import EndpointPicker, endpoint_picker
from plait_testing.mini_kubelet import enter_network
from plait_testing.played_cluster import Cluster, add_arguments, played_cluster, render
from plait_testing.recording import Record
from plait_testing.service_load import KEY
from plait_testing.service_network import CLIENTS

pytestmark = [pytest.mark.slow, pytest.mark.acceptance("cluster")]
POOL = "plait"
NUM_RUNNING, NUM_WAITING = 2, 6
"""Of the busy pod: its seats, and more requests than that."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, check_models: Path) -> Iterator[Cluster]:
    """Two servers of recall-gqa of the pool, ready, with two seats each."""
    values: dict[str, object] = {
        "replicas": 2,
        "autoscaling": {"kind": "none"},
        "inferencePool": {"enabled": True, "endpointPicker": "picker"},
        "monitoring": {"withoutKey": True},
    }
    with played_cluster(tmp_path_factory, check_models) as made:
        documents = render("cpu.yaml", values, tmp_path_factory.mktemp("values"))
        for one in documents:
            if one["kind"] == "Deployment":
                add_arguments(one, "--threads=1", "--num-pages=256", f"--max-seqs={NUM_RUNNING}")
        made.plane.apply(yaml.safe_dump_all(documents))
        made.wait_for(lambda: made.serves(2), "two ready pods")
        yield made


@pytest.fixture(scope="module")
def picker(cluster: Cluster) -> Iterator[EndpointPicker]:
    with endpoint_picker(cluster, POOL) as one:
        yield one


def gauge(picker: EndpointPicker, name: str) -> float:
    return picker.gauges().get(f'inference_pool_{name}{{name="{POOL}"}}', -1.0)


def test_the_picker_sees_the_pods_of_the_pool(cluster: Cluster, picker: EndpointPicker) -> None:
    cluster.wait_for(lambda: gauge(picker, "ready_pods") == 2, f"the pool's pods {picker.log.read_text()[-3000:]}")
    cluster.wait_for(lambda: gauge(picker, "average_queue_size") == 0, "the pods' queues")


def occupy(cluster: Cluster, address: str, asked_to_end: threading.Event) -> None:
    """One client that asks a pod for endless answers, past the Service."""
    enter_network(cluster.network, CLIENTS)
    headers, body = {"Authorization": f"Bearer {KEY}"}, {"prompt": "0123 4567", "ignore_eos": True, "stream": True}
    with httpx.Client(base_url=f"http://{address}:8000", headers=headers, timeout=120, trust_env=False) as client:
        while not asked_to_end.is_set():
            with client.stream("POST", "/v1/completions", json=body | {"max_tokens": 400}) as answer:
                for _ in answer.iter_lines():
                    if asked_to_end.is_set():
                        break


def test_requests_go_to_the_pod_without_a_queue(cluster: Cluster, picker: EndpointPicker, record: Record) -> None:
    busy, free = sorted(cluster.ready())
    asked_to_end = threading.Event()
    num = NUM_RUNNING + NUM_WAITING
    clients = [threading.Thread(target=occupy, args=(cluster, busy, asked_to_end)) for _ in range(num)]
    for client in clients:
        client.start()
    try:
        cluster.wait_for(lambda: gauge(picker, "average_queue_size") >= 2, "the queue of the busy pod")
        picks = [picker.pick("recall-gqa", f"prompt {number}") for number in range(20)]
    finally:
        asked_to_end.set()
        for client in clients:
            client.join()
    record("an InferencePool of a busy server and a free one", "num_picked_busy", "requests", picks.count(busy), 0)
    assert picks == [free] * 20
