"""Every answer of recall-gqa is right on a GPU, whatever the kernels and settings."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
import recall
from metrics import read_metrics
from recording import Record
from running_server import StartServer

pytestmark = pytest.mark.gpu
PAGE_SIZE = 64
BACKENDS = ("triton", "trtllm_mha", "flashinfer", "torch")
# One setting varied at a time from the default, which mixes, overlaps, and captures what it can.
VARIANTS: dict[str, tuple[str, ...]] = {
    "chunk-128": ("--long-prefill", "128"),
    "chunk-512": ("--long-prefill", "512"),
    "chunk-8192": ("--max-batch-tokens", "8192"),
    "no-graphs": ("--no-cuda-graphs",),
    "no-overlap": ("--no-overlap",),
    "few-graphs": ("--max-graph-batch", "3"),
    "preempted": (),
    "fp8": ("--kv-dtype", "fp8"),
}
CASES = [(backend, mixed, "default") for backend in BACKENDS for mixed in ("--mixed", "--no-mixed")]
CASES += [("auto", "--mixed", variant) for variant in VARIANTS]
CASES += [("trtllm_mha", "--no-mixed", "fp8")]


@pytest.mark.acceptance("gpu")
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
    running = server(check_models / "recall-gqa", *flags, *VARIANTS.get(variant, ()))
    assert running.url, running.errors[-2000:]
    num_writers = 12 if variant == "preempted" else 0
    with recall.writers(running.url, num_writers, num_tokens=num_pages * PAGE_SIZE // 4):
        wrong = recall.ask_all(running.url, asked, concurrency=13)
    metrics = read_metrics(running.url)
    case = f"recall-gqa {backend} {mixed.removeprefix('--')} {variant}"
    record(case, "problems_right", "problems", len(asked) - len(wrong), len(asked))
    record(case, "preemptions", "preemptions", metrics["plait_preemptions_total"])
    # Float8 rounds keys to four bits: what that costs is recorded, and held to a tenth of the answers.
    assert len(wrong) <= (len(asked) // 10 if variant == "fp8" else 0)
    assert (metrics['plait_steps_total{kind="mixed"}'] == 0) == (mixed == "--no-mixed")
    assert (metrics["plait_preemptions_total"] > 0) == (variant == "preempted")


# A backend's decode and prefill over pages that another request filled; and pages that come and go beneath.
SHARED_CASES = [(backend, "hits") for backend in BACKENDS] + [("auto", "evicted"), ("auto", "chunk-128")]


@pytest.mark.acceptance("gpu")
@pytest.mark.parametrize(("backend", "variant"), SHARED_CASES)
def test_prompts_from_the_prefix_cache_are_answered_right(
    backend: str,
    variant: str,
    check_models: Path,
    server: StartServer,
    sized: Callable[[int, int], int],
    record: Record,
) -> None:
    num_tables, num_each, context = 5, sized(10, 100), 4096
    tables = [recall.about_one_table(check_models, seed, num_each, context) for seed in range(num_tables)]
    num_pages = 3 * context // PAGE_SIZE if variant == "evicted" else 2048
    flags = ("--device", "cuda", "--attention-backend", backend, "--num-pages", str(num_pages))
    running = server(check_models / "recall-gqa", *flags, *VARIANTS.get(variant, ()))
    wrong = []
    for first in range(0, num_each, 5):
        for asked in tables:
            wrong += recall.ask_all(running.url, asked[first : first + 5], concurrency=3)
    metrics = read_metrics(running.url)
    share = metrics["plait_prefix_hit_tokens_total"] / metrics["plait_prompt_tokens_total"]
    case = f"recall-gqa {backend} shared tables {variant}"
    record(case, "problems_right", "problems", num_tables * num_each - len(wrong), num_tables * num_each)
    record(case, "share_of_prompt_tokens_cached", "share", share)
    assert wrong == []
    assert share > (0.2 if variant == "evicted" else 0.5)
    assert (metrics["plait_prefix_evictions_total"] > 0) == (variant == "evicted")


@pytest.mark.acceptance("gpu")
@pytest.mark.parametrize("backend", ["triton", "trtllm_mha"])
def test_slow_steps_over_foul_memory_change_no_answer(
    backend: str,
    check_models: Path,
    server: StartServer,
    sized: Callable[[int, int], int],
    record: Record,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = os.pathsep.join([str(Path(__file__).parent / "stressed"), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", path)
    flags = ("--device", "cuda", "--attention-backend", backend, "--num-pages", "2048", "--no-prefix-cache")
    running = server(check_models / "recall-gqa", *flags, "--long-prefill", "512")
    assert running.url, running.errors[-2000:]
    wrong, num_asked = [], 0
    for concurrency in (3, 13, 5, 8, 4, 11):  # graphs are padded, by another number of rows each time
        asked = recall.problems(check_models, seed=concurrency, num=sized(5, 70), context=2048)
        asked += recall.problems(check_models, seed=100 + concurrency, num=sized(1, 14), context=8192)
        try:
            wrong += recall.ask_all(running.url, asked, concurrency=concurrency)
        except httpx.HTTPError:
            pytest.fail(running.errors[-2000:])
        num_asked += len(asked)
    case = f"recall-gqa {backend} under stress"
    record(case, "problems_right", "problems", num_asked - len(wrong), num_asked)
    assert wrong == [], running.errors[-2000:]
    assert running.stop() == 0
