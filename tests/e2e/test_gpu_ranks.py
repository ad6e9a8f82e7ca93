"""Two GPUs are one server: every answer is right, and the end of one rank is the end of both."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import httpx
import psutil
import pytest
from plait_testing import gpu_runs, recall
from plait_testing.recording import Record
from plait_testing.running_server import StartServer

pytestmark = pytest.mark.multi_gpu
MODELS = ("recall-gqa", "recall-mla")
VARIANTS = {"default": (), "no-custom-all-reduce": ("--no-custom-all-reduce",), **gpu_runs.VARIANTS}
PLUGIN = Path(gpu_runs.__file__).parent / "rank_plugin"


@pytest.fixture(params=MODELS)
def runs(
    request: pytest.FixtureRequest,
    check_models: Path,
    server: StartServer,
    sized: Callable[[int, int], int],
    record: Record,
) -> gpu_runs.GpuRuns:
    return gpu_runs.GpuRuns(request.param, check_models, server, sized, record, num_ranks=2)


@pytest.mark.acceptance("gpu-ranks")
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_answer_of_two_ranks_is_right(runs: gpu_runs.GpuRuns, variant: str) -> None:
    runs.answers("auto", "--mixed", variant, *VARIANTS[variant])


@pytest.mark.acceptance("gpu-ranks")
@pytest.mark.parametrize("variant", ["default", "chunk-512", "no-graphs", "preempted"])
def test_every_answer_of_two_replicas_that_share_experts_is_right(
    variant: str, check_models: Path, server: StartServer, sized: Callable[[int, int], int], record: Record
) -> None:
    runs = gpu_runs.GpuRuns("recall-mla", check_models, server, sized, record, num_ranks=2, shares_experts=True)
    runs.answers("auto", "--mixed", variant, *VARIANTS[variant])


@pytest.mark.acceptance("gpu-ranks")
def test_ranks_sample_their_own_rows(runs: gpu_runs.GpuRuns) -> None:
    runs.samples()


@pytest.mark.acceptance("gpu-ranks")
def test_slow_steps_over_foul_memory_change_no_answer(runs: gpu_runs.GpuRuns, monkeypatch: pytest.MonkeyPatch) -> None:
    runs.under_stress("auto", monkeypatch)


@pytest.mark.parametrize("lost", [0, 1])
def test_a_killed_rank_ends_the_other_in_the_midst_of_its_collectives(
    check_models: Path, server: StartServer, lost: int
) -> None:
    running = server(check_models / "recall-gqa", "--device", "cuda", "--tp", "2")
    assert running.url, running.errors
    workers = {rank_of(process): process for process in running.workers()}
    body = {"prompt": "count 1 40", "stream": True, "max_tokens": 4000, "ignore_eos": True}
    with httpx.stream("POST", running.url + "/v1/completions", json=body, timeout=60) as streamed:
        lines = (line for line in streamed.iter_lines() if line)
        next(lines)
        workers[lost].kill()
        *_, last = lines
    assert "a worker was lost" in last
    assert running.wait() == 5
    assert f"rank {lost} was lost: worker {lost} was killed by SIGKILL" in running.last_line
    assert not workers[1 - lost].is_running()


def test_ranks_that_cannot_open_each_other_s_memory_go_on_by_nccl_and_say_so(
    check_models: Path, server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(PLUGIN), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("PLAIT_TEST_UNREACHABLE", "1")
    running = server(check_models / "recall-gqa", "--device", "cuda", "--tp", "2")
    assert running.url, running.errors
    said = "all-reduce: NCCL; the peer kernel cannot open the memory of another GPU: the CUDA driver answered"
    assert f"{said} CUDA_ERROR_PEER_ACCESS_UNSUPPORTED on rank 1" in running.errors
    asked = recall.problems(seed=7, num=10, context=2048)
    assert not recall.ask_all(running.url, asked, model="recall-gqa", concurrency=5)


def rank_of(process: psutil.Process) -> int:
    words: list[str] = process.cmdline()
    return int(words[words.index("--rank") + 1])


def test_more_ranks_than_gpus_end_with_what_works(check_models: Path, server: StartServer) -> None:
    import torch

    num_gpus = torch.cuda.device_count()
    refused = server(check_models / "recall-gqa", "--device", "cuda", "--tp", str(2 * num_gpus))
    assert refused.wait() == 3
    assert f"and {num_gpus} are visible; set --tp to {num_gpus} at most" in refused.last_line
