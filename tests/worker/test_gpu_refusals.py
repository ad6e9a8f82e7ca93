"""What a GPU cannot serve is rejected with the reason and what to do; these need no GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from plait_proto import ExitCode
from plait_testing.engine_side import engine_side
from plait_testing.tiny_models import config_for, save_tiny_llama
from plait_worker.attention.backend import BackendRequirements
from plait_worker.attention.registry import all_names, find, names
from plait_worker.attention.selection import choose_backend
from plait_worker.attention.spec import MhaShape
from plait_worker.capacity import MemoryBudget, choose_num_pages, gpu_pool_bytes
from plait_worker.errors import WorkerError

HEADS = MhaShape(32, 8, 128, 128**-0.5, torch.bfloat16)
GIB = 1 << 30
AMPERE = (8, 0)


@pytest.mark.process
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_a_gpu_that_is_not_there_ends_the_rank_with_what_to_do(tmp_path: Path) -> None:
    save_tiny_llama(tmp_path)
    with engine_side() as engine:
        engine.start(config_for(tmp_path, engine.folder, device="cuda"))
        fail, code, errors = engine.failure()
    assert (fail.code, code) == (ExitCode.HARDWARE, ExitCode.HARDWARE)
    assert fail.reason.startswith("--device cuda: no NVIDIA GPU is there for torch")
    assert fail.reason.endswith("check the driver with nvidia-smi, or serve with --device cpu")
    assert "Traceback" not in errors


@pytest.mark.parametrize("name", all_names())
def test_a_backend_that_cannot_run_here_is_rejected_by_its_flag(name: str) -> None:
    requirements = BackendRequirements(HEADS, 64, 0, 256, torch.device("cpu"))
    with pytest.raises(
        WorkerError, match=rf"--attention-backend {name}: it .*; auto takes one that runs here"
    ) as error:
        choose_backend(name, requirements)
    assert error.value.code == ExitCode.HARDWARE


def test_an_older_gpu_has_none_of_the_kernels_and_each_says_what_it_needs() -> None:
    assert names(MhaShape.kind, AMPERE) == []
    assert find("trtllm_mha", HEADS, AMPERE) == "it needs a GPU of compute capability 9.0 or 10.0 or 10.3"


def test_too_little_memory_for_one_request_says_how_much_and_what_to_lower(tmp_path: Path) -> None:
    config = config_for(tmp_path, tmp_path, max_model_len=40_960, page_size=64)
    page_bytes = 9 << 20  # Qwen3-8B's
    budget = MemoryBudget(free_bytes=8 * GIB, weight_bytes=16 * GIB, activation_bytes=5 * GIB)
    reason = r"needs 5\.62 GiB .* 0\.60 GiB are there .*8\.00 GiB of memory are free, a step takes 5\.00 GiB"
    with pytest.raises(WorkerError, match=rf"{reason}\); lower --max-model-len or --max-batch-tokens") as error:
        choose_num_pages(config, page_bytes, gpu_pool_bytes(config, budget), budget)
    assert error.value.code == ExitCode.HARDWARE
