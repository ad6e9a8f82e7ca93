"""Every answer of recall-mla is right on a GPU, whatever the kernels and settings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from gpu_runs import GpuRuns
from recording import Record
from running_server import StartServer

pytestmark = pytest.mark.gpu
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
FP8 = ("--kv-dtype", "fp8", "--k-scale", "0.37")
CASES = [(backend, mixed, "default") for backend in BACKENDS for mixed in ("--mixed", "--no-mixed")]
CASES += [("auto", "--mixed", variant) for variant in VARIANTS]
FP8_CASES = [("flashmla", "--mixed"), ("flashmla", "--no-mixed"), ("flashinfer_mla", "--mixed"), ("torch", "--mixed")]


@pytest.fixture
def runs(check_models: Path, server: StartServer, sized: Callable[[int, int], int], record: Record) -> GpuRuns:
    return GpuRuns("recall-mla", check_models, server, sized, record)


@pytest.mark.acceptance("gpu-mla")
@pytest.mark.parametrize(("backend", "mixed", "variant"), CASES)
def test_every_answer_is_right(runs: GpuRuns, backend: str, mixed: str, variant: str) -> None:
    runs.answers(backend, mixed, variant, *VARIANTS.get(variant, ()))


@pytest.mark.acceptance("gpu-mla")
@pytest.mark.parametrize(("backend", "mixed"), FP8_CASES)
def test_answers_from_float8_are_right_but_for_a_few(runs: GpuRuns, backend: str, mixed: str) -> None:
    runs.answers(backend, mixed, "fp8", *FP8)


# A backend's absorbed and ragged halves over pages that another request filled; and pages that come and go beneath.
SHARED_CASES = [(backend, "hits") for backend in BACKENDS] + [("auto", "evicted"), ("auto", "chunk-64")]


@pytest.mark.acceptance("gpu-mla")
@pytest.mark.parametrize(("backend", "variant"), SHARED_CASES)
def test_prompts_from_the_prefix_cache_are_answered_right(runs: GpuRuns, backend: str, variant: str) -> None:
    runs.shared_tables(backend, variant, *VARIANTS.get(variant, ()))


@pytest.mark.acceptance("gpu-mla")
@pytest.mark.parametrize("backend", ["flashmla", "flashinfer_mla"])
def test_slow_steps_over_foul_memory_change_no_answer(
    runs: GpuRuns, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs.under_stress(backend, monkeypatch)
