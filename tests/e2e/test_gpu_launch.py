"""`plait launch` on two nodes of a GPU each: answers are right, and their rate beside ranks of one node."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from plait_testing.gpu_nodes import GpuNodes
from plait_testing.node_network import interrupt, reason_without_namespaces, wait_for_all
from plait_testing.recording import Record
from plait_testing.running_server import StartServer, wait_until_ready

pytestmark = pytest.mark.multi_gpu
MODEL = "recall-mla"
LAYOUTS = {"tp-2": ("--tp", "2"), "dp-attention-2": ("--dp", "2", "--dp-attention")}
FLAGS = ("--device", "cuda", "--no-prefix-cache")
OVER_NCCL = {"tp-2": "all-reduce", "dp-attention-2": "exchange of rows for experts"}
"""What the ranks leave to NCCL, as they say it."""
LOAD = ("--num-prompts", "512", "--concurrency", "64", "--input-len", "128", "--output-len", "128")
AS_IT_IS = ("--token-range", "8-200", "--max-lag-ms", "10000", "--no-plots")
"""Ids of the small model; the figure is of a busy client, alike in both layouts."""
END_SECONDS = 60.0
Sized = Callable[[int, int], int]


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[GpuNodes]:
    if reason := reason_without_namespaces():
        pytest.skip(reason)
    with GpuNodes(2, tmp_path) as made:
        yield made


@pytest.mark.acceptance("gpu-ranks")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_nodes_of_a_gpu_each_answer_right(
    layout: str, nodes: GpuNodes, tmp_path: Path, check_models: Path, keys: Path, sized: Sized, record: Record
) -> None:
    launched = nodes.launch_all(tmp_path, check_models / MODEL, keys, *LAYOUTS[layout], *FLAGS)
    head = launched[0]
    wait_until_ready(head)
    assert head.url, head.errors
    said = "\n".join(head.lines) + head.errors
    assert "between the nodes (nccl): " in said
    assert f"{OVER_NCCL[layout]}: NCCL; the peer kernel takes GPUs of one host" in said
    num = sized(20, 100)
    wrong = nodes.wrong_recall(0, head.url, MODEL, num, 2048)
    record(f"two nodes, {layout}", "problems_right", "problems", num - len(wrong), num)
    assert wrong == []
    rate = rate_of(nodes.command(0), head.url, tmp_path)
    record(f"two nodes, {layout}", "output_rate", "tokens/s", rate)
    interrupt(head)
    assert wait_for_all(launched, END_SECONDS) == [0, 0]


@pytest.mark.acceptance("gpu-ranks")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_node_of_both_gpus_answers_the_same_load(
    layout: str, tmp_path: Path, check_models: Path, server: StartServer, record: Record
) -> None:
    running = server(check_models / MODEL, *LAYOUTS[layout], *FLAGS)
    assert running.url, running.errors
    rate = rate_of([sys.executable], running.url, tmp_path)
    record(f"one node, {layout}", "output_rate", "tokens/s", rate)


def rate_of(python: list[str], url: str, folder: Path) -> float:
    """Output tokens a second, as a client on the node of `python` counts them."""
    words = ["-m", "plait.cli", "bench", "serve", "--url", url, *LOAD, *AS_IT_IS, "--out", str(folder / "bench")]
    subprocess.run([*python, *words], check=True, capture_output=True, timeout=300)
    (path,) = (folder / "bench").glob("*.json")
    found = {row["metric"]: float(row["value"]) for row in json.loads(path.read_text())["rows"]}
    assert found["num_failed"] == 0
    return found["output_tokens_per_second"]
