"""`plait kernels` says what a model's attention has compiled on a GPU, and what to do where nothing can be."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from plait_proto import ExitCode
from plait_testing.deepseek_v4 import random_v4
from plait_worker import kernels_command
from plait_worker.attention.backend import BackendRequirements
from plait_worker.attention.jit.modules import has_fmha_v2
from plait_worker.attention.registry import HOPPER, modules_for
from plait_worker.attention.selection import try_backend
from plait_worker.attention.spec import MhaShape, MlaShape
from plait_worker.triton_cache import compiled_kernels

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
(CAPABILITY,) = HOPPER
GQA = MhaShape(14, 2, 128, 128**-0.5, torch.bfloat16)
MLA = MlaShape(16, 512, 576, 192, 128, 192**-0.5, torch.bfloat16, torch.bfloat16)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A configuration is all that is asked for."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def run(monkeypatch: pytest.MonkeyPatch, model: Path, *words: str) -> int:
    settings = ["--dtype", "auto", "--kv-cache-dtype", "auto", "--page-size", "16", "--tp", "1"]
    monkeypatch.setattr(sys, "argv", ["plait kernels", "build", "--model", str(model), *settings, *words])
    return kernels_command.main()


@pytest.mark.process
def test_a_machine_without_a_gpu_is_told_how_to_build_for_one(model: Path) -> None:
    told = subprocess.run(
        [sys.executable, "-m", "plait.cli", "kernels", "list", str(model)],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert told.returncode == ExitCode.HARDWARE
    last = told.stderr.splitlines()[-1]
    assert last.startswith("plait: hardware error (exit code 3): no NVIDIA GPU is there")
    assert "--arch 9.0" in last


def test_a_model_that_no_gpu_runs_has_nothing_to_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    random_v4("mixed").save_pretrained(tmp_path)
    assert run(monkeypatch, tmp_path, "--arch", "9.0") == ExitCode.SETTINGS
    assert "DeepseekV4ForCausalLM has no GPU kernels" in capsys.readouterr().err


def test_without_flashinfer_it_says_what_to_install(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kernels_command, "has_flashinfer", lambda: False)
    assert run(monkeypatch, model, "--arch", "9.0") == ExitCode.SETTINGS
    assert "flashinfer is not installed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--arch", "8.0"], ExitCode.SETTINGS, "--arch is '8.0'; allowed: 9.0, 10.0, 10.3"),
        (["--arch", "hopper"], ExitCode.SETTINGS, "--arch is 'hopper'; allowed: 9.0"),
        (["--arch", "9.0", "--tp", "5"], ExitCode.SETTINGS, "--tp 5 does not divide"),
        (["--arch", "9.0", "--dtype", "float32"], ExitCode.SETTINGS, "float32 uses torch attention"),
        (["--arch", "9.0", "--model", "/nowhere"], ExitCode.MODEL_FILES, "/nowhere does not exist"),
    ],
)
def test_what_cannot_be_built_for_is_refused(
    words: list[str],
    code: ExitCode,
    said: str,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(monkeypatch, model, *words) == code
    assert said in capsys.readouterr().err


@pytest.mark.usefixtures("for_hopper")
def test_each_backend_names_the_modules_that_it_loads() -> None:
    of_gqa = {module.name: module.backends for module in modules_for([GQA], 16, CAPABILITY)}
    assert [(told(name), backends) for name, backends in of_gqa.items()] == [
        ("fmha_v2_q_paged_kv_hnd", ("triton", "trtllm_mha")),
        ("page_size_16_head_dim_128_head_group_ratio_7", ("trtllm_mha",)),
        ("head_dim_qk_128_head_dim_vo_128 sm90", ("flashinfer",)),
        ("head_dim_qk_128_head_dim_vo_128 kv_stride_equal", ("flashinfer",)),
    ]
    of_mla = {module.name: module.backends for module in modules_for([MLA], 64, CAPABILITY)}
    assert [(told(name), backends) for name, backends in of_mla.items()] == [
        ("head_dim_qk_192_head_dim_vo_128 sm90", ("triton_mla", "flashmla", "flashinfer_mla")),
        ("head_dim_ckv_512_head_dim_kpe_64 sm90", ("flashinfer_mla",)),
    ]
    assert modules_for([MLA], 64, (10, 0)) == []


@pytest.mark.usefixtures("for_hopper")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fmha_v2_is_found_by_the_name_that_flashinfer_gives_it(dtype: torch.dtype) -> None:
    from flashinfer.jit.attention.modules import gen_fmha_v2_module

    found = modules_for([dataclasses.replace(GQA, dtype=dtype)], 64, CAPABILITY)[0]
    assert found.name == gen_fmha_v2_module("q_paged_kv_hnd", dtype, dtype).name


@pytest.mark.usefixtures("for_hopper")
def test_a_module_is_looked_for_where_flashinfer_loads_it_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from flashinfer.jit import env

    monkeypatch.setattr(env, "FLASHINFER_AOT_DIR", tmp_path / "aot")
    monkeypatch.setattr(env, "FLASHINFER_JIT_DIR", tmp_path / "jit")
    assert not has_fmha_v2(GQA)
    for folder, state in (("jit", "outdated"), ("aot", "prebuilt")):  # ninja has no rules for the former
        for module in modules_for([GQA], 64, CAPABILITY):
            assert module.state != state
            library = tmp_path / folder / module.name / f"{module.name}.so"
            library.parent.mkdir(parents=True)
            library.touch()
            assert module.state == state
        assert has_fmha_v2(GQA) == (state == "prebuilt")


def told(name: str) -> str:
    """What a module's name says of the shape that it is for."""
    parts = re.findall(r"fmha_v2_q_paged_kv_hnd|page_size_\d+|head_[a-z_]+_\d+|sm90$|kv_stride_equal$", name)
    own = "_".join(part for part in parts if part not in ("sm90", "kv_stride_equal"))
    return " ".join([own, *(part for part in parts if part in ("sm90", "kv_stride_equal"))])


@pytest.mark.usefixtures("for_hopper")
def test_without_a_compiler_a_backend_whose_modules_are_missing_is_out_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("plait_worker.attention.selection.find_nvcc", lambda: None)
    monkeypatch.setattr("plait_worker.attention.selection.compute_capability", lambda _device: CAPABILITY)
    outcome = try_backend("trtllm_mha", BackendRequirements(GQA, 16, 64, 64, torch.device("cpu")))
    assert isinstance(outcome, str)
    assert "not built, and there is no nvcc; run `plait kernels build` for advice" in outcome


@pytest.mark.usefixtures("for_hopper")
def test_with_a_compiler_auto_still_does_not_take_minutes_to_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plait_worker.attention.selection.find_nvcc", lambda: Path("nvcc"))
    monkeypatch.setattr("plait_worker.attention.selection.compute_capability", lambda _device: CAPABILITY)
    outcome = try_backend("trtllm_mha", BackendRequirements(GQA, 16, 64, 64, torch.device("cpu")))
    assert outcome == "2 of its modules are not built; run `plait kernels build`, which takes minutes"


@pytest.mark.usefixtures("for_hopper")
def test_xqa_over_float8_pages_is_a_module_of_its_own() -> None:
    of_fp8 = modules_for([dataclasses.replace(GQA, is_fp8=True)], 16, CAPABILITY)
    assert [module.name for module in of_fp8 if "kv_cache_e4m3" in module.name]


def test_what_triton_has_compiled_of_ours_is_counted(tmp_path: Path) -> None:
    assert not compiled_kernels(tmp_path)
    for number, name in enumerate(["_silu_mul_kernel", "_silu_mul_kernel", "_skinny_gemm_kernel", "_somebody_elses"]):
        (tmp_path / f"{number}").mkdir()
        (tmp_path / f"{number}" / f"{name}.cubin").touch()
    (tmp_path / "0" / "_silu_mul_kernel.ptx").touch()
    assert compiled_kernels(tmp_path) == {"_silu_mul_kernel": 2, "_skinny_gemm_kernel": 1}
