"""Torch keeps its threads if it does some of the heavy work, and the log says which."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from plait_testing.attention_cases import cpu_attention
from plait_worker.models.loader import load_model
from plait_worker.parallel import Parallel
from plait_worker.torch_threads import limit_torch_threads
from plait_worker.weights.cache_scales import Fp8Cache

CPU = torch.device("cpu")
WIDE = {"intermediate_size": 96, "moe_intermediate_size": 32}
"""What the compiled kernels take."""
ONE_CALL = "the decoder's layers run as one compiled call a step"


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


@pytest.mark.parametrize(
    ("family", "changes", "dtype", "fp8", "said"),
    [
        ("llama", WIDE, "float32", False, [ONE_CALL]),
        ("llama", WIDE, "bfloat16", False, [ONE_CALL]),
        ("llama", WIDE, "float32", True, ["left to torch: attention, on 2 threads"]),
        ("llama", WIDE, "float16", False, ["left to torch: GEMMs in float16, attention, on 2 threads"]),
        ("qwen3_moe", WIDE, "float32", False, []),
        ("qwen3_moe", {"moe_intermediate_size": 24}, "float32", False, ["left to torch: experts, on 2 threads"]),
        ("deepseek_v3", WIDE, "float32", False, []),
        ("deepseek_v3", WIDE, "float32", True, ["left to torch: attention, on 2 threads"]),
        ("deepseek_v3", {"moe_intermediate_size": 24}, "float32", False, ["left to torch: experts, on 2 threads"]),
    ],
)
def test_torch_keeps_its_threads_for_what_the_kernels_leave_it(
    family: str,
    changes: dict[str, Any],
    dtype: str,
    fp8: bool,
    said: list[str],
    save_tiny: Callable[..., Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = save_tiny(family, **changes).path
    model = load_model(path, dtype, CPU, Parallel(), fp8=Fp8Cache(1.0, 1.0) if fp8 else None)
    attention = cpu_attention(model.attention_specs, 16, 64)
    with caplog.at_level(logging.INFO, "plait_worker.torch_threads"):
        limit_torch_threads(model, attention)
    assert [record.message for record in caplog.records if record.name == "plait_worker.torch_threads"] == said
    assert torch.get_num_threads() == (2 if any("left" in line for line in said) else 1)
