"""Every answer of recall-mla is right on a GPU, whatever the kernels and settings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import recall
from metrics import read_metrics
from recording import Record
from running_server import StartServer

pytestmark = pytest.mark.gpu
PAGE_SIZE = 64
BACKENDS = ("flashmla", "flashinfer_mla", "torch")
# One setting varied at a time from the default, which mixes, overlaps, and captures what it can.
VARIANTS: dict[str, tuple[str, ...]] = {
    "chunk-64": ("--long-prefill", "64"),
    "chunk-512": ("--long-prefill", "512"),
    "chunk-8192": ("--max-batch-tokens", "8192"),
    "context-chunk-256": ("--context-chunk", "256", "--long-prefill", "1024"),
    "no-graphs": ("--no-cuda-graphs",),
    "no-overlap": ("--no-overlap",),
    "no-prefix-cache": ("--no-prefix-cache",),
    "few-graphs": ("--max-graph-batch", "3"),
    "preempted": (),
}
CASES = [(backend, mixed, "default") for backend in BACKENDS for mixed in ("--mixed", "--no-mixed")]
CASES += [("auto", "--mixed", variant) for variant in VARIANTS]


@pytest.mark.parametrize(("backend", "mixed", "variant"), CASES)
def test_every_answer_is_right(
    backend: str,
    mixed: str,
    variant: str,
    check_models: Path,
    server: StartServer,
    sized: Callable[[int, int], int],
    record: Record,
) -> None:
    asked = recall.problems(check_models, seed=1, num=sized(40, 400), context=2048)
    asked += recall.problems(check_models, seed=2, num=sized(10, 100), context=8192)
    longest = -(-(max(map(recall.num_bytes, asked)) + 8) // PAGE_SIZE)
    num_pages = longest if variant == "preempted" else 2048
    flags = ("--device", "cuda", "--attention-backend", backend, mixed, "--num-pages", str(num_pages))
    running = server(check_models / "recall-mla", *flags, *VARIANTS.get(variant, ()))
    num_writers = 12 if variant == "preempted" else 0
    with recall.writers(running.url, num_writers, num_pages * PAGE_SIZE // 4, "recall-mla"):
        wrong = recall.ask_all(running.url, asked, model="recall-mla", concurrency=13)
    metrics = read_metrics(running.url)
    case = f"recall-mla {backend} {mixed.removeprefix('--')} {variant}"
    record(case, "problems_right", "problems", len(asked) - len(wrong), len(asked))
    record(case, "preemptions", "preemptions", metrics["plait_preemptions_total"])
    assert wrong == []
    assert (metrics['plait_steps_total{kind="mixed"}'] == 0) == (mixed == "--no-mixed")
    assert (metrics["plait_preemptions_total"] > 0) == (variant == "preempted")
