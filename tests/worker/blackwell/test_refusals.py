"""What the Blackwell kernels do not take is refused at start, with their rule."""

from __future__ import annotations

import pytest
import torch
from plait_kernels.kv_cache import FP8
from plait_proto import ExitCode
from plait_testing.attention_cases import CPU, mha_shape, mla_shape
from plait_testing.trtllm_gen import Launcher
from plait_worker.attention.backend import BackendRequirements
from plait_worker.attention.selection import choose_backend
from plait_worker.attention.spec import MhaShape, MlaShape
from plait_worker.errors import WorkerError

RULES = [
    ("trtllm_mla", mla_shape(), 16, "pages of 32 or 64 tokens, not 16; set --page-size 64"),
    ("trtllm_mla", mla_shape(96), 64, "up to 64 heads on a rank, or 128, not 96"),
    ("trtllm_mla", mla_shape(latent_dim=384), 64, "kv_lora_rank of 512 or 256 with 64 rope dims, not 384"),
    ("trtllm_mla", mla_shape(query_dim=160), 64, "192 query dims with 128 value dims"),
    ("trtllm_mla", mla_shape(dtype=torch.float16), 64, "set --dtype bfloat16"),
    ("trtllm_mla", mla_shape(dtype=torch.float32), 64, "not float32"),
    ("trtllm_mla", mha_shape(), 64, "attention to keys and values"),
    ("cutlass_mla", mla_shape(64), 128, "takes 128 heads on a rank, not 64; use trtllm_mla"),
    ("cutlass_mla", mla_shape(128), 16, "pages of 32, 64 or 128 tokens, not 16; set --page-size 128"),
    ("cutlass_mla", mla_shape(128, cached_dtype=FP8), 128, "bfloat16 with a cache of bfloat16"),
    ("trtllm_mha", mha_shape(), 128, "pages of 16, 32 or 64 tokens, not 128"),
    ("trtllm_mha", mha_shape(head_dim=96), 64, "head_dim of 64, 128 or 256, not 96"),
    ("trtllm_mha", mla_shape(), 64, "latent attention"),
]


@pytest.mark.parametrize(("name", "shape", "page_size", "rule"), RULES)
def test_the_rule_is_named(
    launcher: Launcher, name: str, shape: MhaShape | MlaShape, page_size: int, rule: str
) -> None:
    with pytest.raises(WorkerError) as refused:
        choose_backend(name, BackendRequirements(shape, page_size, 64, 256, CPU))
    assert refused.value.code == ExitCode.HARDWARE
    assert rule in refused.value.reason
    assert f"--attention-backend {name}" in refused.value.reason


@pytest.mark.parametrize("shape", [mha_shape(), mla_shape()])
def test_a_cpu_is_no_blackwell(shape: MhaShape | MlaShape) -> None:
    name = "trtllm_mla" if isinstance(shape, MlaShape) else "trtllm_mha"
    with pytest.raises(WorkerError, match=r"needs a GPU of compute capability .*10\.0 or 10\.3"):
        choose_backend(name, BackendRequirements(shape, 64, 64, 256, CPU))


def test_float8_latents_pass_the_problem_at_start(launcher: Launcher) -> None:
    shape = mla_shape(2, cached_dtype=FP8, cached_scale=0.37)
    assert choose_backend("trtllm_mla", BackendRequirements(shape, 32, 128, 256, CPU)).name == "trtllm_mla"
    assert {"decompressed causal", "mla ragged", "mla decode"} <= set(launcher.calls)


def test_kernels_that_leave_what_is_no_number_are_refused(launcher: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plait_testing.trtllm_gen.attend", lambda *_: None)
    with pytest.raises(WorkerError, match="its result is off by nan"):
        choose_backend("trtllm_mla", BackendRequirements(mla_shape(2), 32, 128, 256, CPU))


def test_heads_whose_short_prompts_fa3_may_answer_wrongly_are_refused(flashinfer_there: None) -> None:
    from plait_worker.attention.mla.flashinfer_mla import FlashinferMla

    with pytest.raises(ValueError, match=r"heads of a rank \(12\) do not divide 128; use flashmla"):
        FlashinferMla(BackendRequirements(mla_shape(12, scale=192**-0.5), 64, 256, 256, CPU))
