"""Every answer of recall-mla is right on a GPU, whatever the kernels and settings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from plait_testing import gpu_runs
from plait_testing.recording import Record
from plait_testing.running_server import StartServer

pytestmark = pytest.mark.gpu
BACKENDS = ("flashmla", "flashinfer_mla", "triton_mla", "torch")
VARIANTS = gpu_runs.VARIANTS | {
    "chunk-64": ("--long-prefill-token-threshold", "64"),
    "context-chunk-256": ("--mla-context-chunk-size", "256", "--long-prefill-token-threshold", "1024"),
    "no-prefix-cache": ("--no-prefix-cache",),
}
FP8 = ("--kv-cache-dtype", "fp8", "--k-scale", "0.37")
CASES = gpu_runs.cases(BACKENDS, VARIANTS)
FP8_CASES = [("flashmla", "--mixed"), ("flashmla", "--no-mixed"), ("flashinfer_mla", "--mixed"), ("torch", "--mixed")]


@pytest.fixture
def runs(check_models: Path, server: StartServer, sized: Callable[[int, int], int], record: Record) -> gpu_runs.GpuRuns:
    return gpu_runs.GpuRuns("recall-mla", check_models, server, sized, record)


@pytest.mark.acceptance("gpu-mla")
@pytest.mark.parametrize(("backend", "mixed", "variant"), CASES)
def test_every_answer_is_right(runs: gpu_runs.GpuRuns, backend: str, mixed: str, variant: str) -> None:
    runs.answers(backend, mixed, variant, *VARIANTS.get(variant, ()))


@pytest.mark.acceptance("gpu-mla")
@pytest.mark.parametrize(("backend", "mixed"), FP8_CASES)
def test_answers_from_float8_are_right_but_for_a_few(runs: gpu_runs.GpuRuns, backend: str, mixed: str) -> None:
    runs.answers(backend, mixed, "fp8", *FP8)


@pytest.mark.acceptance("gpu-mla")
@pytest.mark.parametrize(("backend", "variant"), gpu_runs.shared_cases(BACKENDS, "chunk-64"))
def test_prompts_from_the_prefix_cache_are_answered_right(runs: gpu_runs.GpuRuns, backend: str, variant: str) -> None:
    runs.shared_tables(backend, variant, *VARIANTS.get(variant, ()))


@pytest.mark.acceptance("gpu-mla")
@pytest.mark.parametrize("backend", ["flashmla", "flashinfer_mla", "triton_mla"])
def test_slow_steps_over_foul_memory_change_no_answer(
    runs: gpu_runs.GpuRuns, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs.under_stress(backend, monkeypatch)


@pytest.mark.acceptance("gpu-mla")
@pytest.mark.parametrize("variant", gpu_runs.CONSTRAINED)
def test_four_choices_are_right_where_half_of_the_requests_are_constrained(
    runs: gpu_runs.GpuRuns, variant: str
) -> None:
    runs.constrained(variant, *gpu_runs.CONSTRAINED[variant])


@pytest.mark.acceptance("gpu-mla")
@pytest.mark.parametrize("cache", ["--prefix-cache", "--no-prefix-cache"])
def test_slow_steps_over_foul_memory_change_no_choice_and_no_constrained_answer(
    runs: gpu_runs.GpuRuns, cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs.constrained_under_stress(cache, monkeypatch)
