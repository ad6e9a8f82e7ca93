"""Random models at the kernels' own sizes, in bfloat16, teacher-forced against float32.

A backend may differ from float32 hardly more than the torch backend does: both round the same values.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from plait_kernels.linear import Fp8Matrix, RowNorm
from plait_kernels.nvrtc import no_compiler_reason
from plait_testing.gpu_driver import GPU, NUM_TOKENS, PAGE_SIZE, RANDOM, GpuDriver, divergence, logprobs, save_random
from plait_testing.recording import Record
from plait_worker.attention.backend import BackendRequirements
from plait_worker.attention.mha.torch_mha import TorchMha
from plait_worker.attention.registry import names
from plait_worker.attention.selection import try_backend
from plait_worker.attention.spec import MhaShape
from plait_worker.models.loader import load_model
from plait_worker.models.model import Model
from plait_worker.parallel import Parallel
from torch import Tensor

pytestmark = pytest.mark.gpu
GROUPS = (1, 2, 4, 5, 6, 8)
LIMIT = 1.5
# A token that rounding turns to another expert is far off, whoever computes attention: there are few, so of the tail.
LIMIT_OF_EXPERTS = 4.0
FAMILIES: dict[str, tuple[type[transformers.PretrainedConfig], dict[str, Any]]] = {
    "llama": (transformers.LlamaConfig, {}),
    "qwen2": (transformers.Qwen2Config, {}),
    "minimax_m2": (
        transformers.MiniMaxM2Config,
        {"head_dim": 128, "rotary_dim": 64, "num_local_experts": 8, "num_experts_per_tok": 2},
    ),
}


def save_qwen3(path: Path, group: int) -> None:
    """Of two key-value heads, each with so many query heads."""
    heads = {"num_attention_heads": 2 * group, "num_key_value_heads": 2, "head_dim": 128}
    save_random(path, transformers.Qwen3Config(hidden_size=512, **heads, **RANDOM), seed=group)


def backend_requirements(model: Model[Any]) -> BackendRequirements[Any]:
    return BackendRequirements(model.attention_specs[0], PAGE_SIZE, 0, 2 * NUM_TOKENS, GPU)


def torch_attention(model: Model[Any]) -> TorchMha:
    return TorchMha(backend_requirements(model))


@pytest.mark.acceptance("gpu")
@pytest.mark.parametrize("group", GROUPS)
def test_backends_round_no_worse_than_torch(group: int, tmp_path: Path, record: Record) -> None:
    save_qwen3(tmp_path, group)
    assert_backends_round_no_worse(tmp_path, f"group {group}", {"median": LIMIT, "p99": LIMIT}, record)


@pytest.mark.acceptance("gpu")
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_rounded_no_worse_than_by_torch(family: str, tmp_path: Path, record: Record) -> None:
    kind, own = FAMILIES[family]
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2}
    save_random(tmp_path, kind(hidden_size=1024, **heads, **RANDOM, **own), seed=1)
    of_tail = LIMIT_OF_EXPERTS if "num_local_experts" in own else LIMIT
    assert_backends_round_no_worse(tmp_path, family, {"median": LIMIT, "p99": of_tail}, record)


def assert_backends_round_no_worse(path: Path, label: str, limits: dict[str, float], record: Record) -> None:
    """By each statistic of the divergence from float32, times its limit."""
    ids = torch.randint(2048, (NUM_TOKENS,), generator=torch.Generator().manual_seed(0)).tolist()
    exact = load_model(path, "float32", GPU, Parallel())
    right = logprobs(exact, torch_attention(exact), ids)
    model = load_model(path, "bfloat16", GPU, Parallel())
    rounded = logprobs(model, torch_attention(model), ids)
    for name in names(MhaShape.kind, (9, 0)):
        outcome = try_backend(name, backend_requirements(model))
        assert not isinstance(outcome, str), outcome
        given = logprobs(model, outcome, ids)
        for kind, *three in zip(("prefill", "decode"), right, rounded, given, strict=True):
            of_torch, of_backend = (divergence(three[0], bf16) for bf16 in three[1:])
            for statistic, quantile in (("median", 0.5), ("p99", 0.99)):
                value, torch_value = (float(each.quantile(quantile)) for each in (of_backend, of_torch))
                limit = limits[statistic] * torch_value
                record(f"{name} {label} {kind}", f"kl_{statistic}", "nats", value, limit)
                assert value <= limit


@pytest.mark.acceptance("gpu")
@pytest.mark.parametrize("backend", names(MhaShape.kind, (9, 0)))
def test_a_row_alone_gets_what_it_gets_beside_others(backend: str, tmp_path: Path) -> None:
    """Alone, its norms and gate are fused into GEMVs; both ways round the same values."""
    save_qwen3(tmp_path, 4)
    ids = torch.randint(2048, (400,), generator=torch.Generator().manual_seed(1)).tolist()
    model = load_model(tmp_path, "bfloat16", GPU, Parallel())
    exact = load_model(tmp_path, "float32", GPU, Parallel())
    attention = try_backend(backend, backend_requirements(model))
    assert not isinstance(attention, str), attention
    right = one_by_one(GpuDriver(exact, torch_attention(exact)), ids, {})
    alone = one_by_one(GpuDriver(model, attention), ids, {})
    beside = one_by_one(GpuDriver(model, attention), ids, {"other": ids[:77]})
    of_alone, of_beside = (divergence(right, given).median() for given in (alone, beside))
    assert float(of_alone) <= LIMIT * float(of_beside)


@pytest.mark.acceptance("gpu-fp8")
@pytest.mark.skipif(no_compiler_reason() is not None, reason="no NVRTC")
def test_a_few_fp8_rows_get_what_a_gate_of_its_own_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a size in the tuning table the GEMM applies the gate; both ways round as often."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("FP8 GEMMs in CUDA C++ are for Hopper GPUs")
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128}
    sizes = RANDOM | {"hidden_size": 2048, "intermediate_size": 2816}
    save_random(tmp_path, transformers.Qwen3Config(**heads, **sizes), seed=1)
    ids = torch.randint(2048, (400,), generator=torch.Generator().manual_seed(1)).tolist()
    exact = load_model(tmp_path, "float32", GPU, Parallel())
    model = load_model(tmp_path, "bfloat16", GPU, Parallel(), quantises=True)
    attention = try_backend("triton", backend_requirements(model))
    assert not isinstance(attention, str), attention
    right = one_by_one(GpuDriver(exact, torch_attention(exact)), ids, {"other": ids[:77]})
    gated_rows: list[int] = []
    gate_up = Fp8Matrix.rmsnorm_gate_up

    def counted(matrix: Fp8Matrix, x_NI: Tensor, norm: RowNorm) -> tuple[Tensor, Tensor]:
        gated_rows.append(len(x_NI))
        return gate_up(matrix, x_NI, norm)

    monkeypatch.setattr(Fp8Matrix, "rmsnorm_gate_up", counted)
    together = one_by_one(GpuDriver(model, attention), ids, {"other": ids[:77]})
    assert gated_rows == [2] * 300 * RANDOM["num_hidden_layers"]
    monkeypatch.setattr(Fp8Matrix, "gates", lambda _matrix, num_rows: num_rows == 1)
    apart = one_by_one(GpuDriver(model, attention), ids, {"other": ids[:77]})
    of_together, of_apart = (divergence(right, given).median() for given in (together, apart))
    assert float(of_together) <= LIMIT * float(of_apart)
    assert float(divergence(apart, together).median()) <= float(of_apart), "FP8 itself rounds more"


def one_by_one(driver: GpuDriver, ids: list[int], others: dict[str, list[int]]) -> Tensor:
    """Log-probabilities of the tokens behind a short prompt, each a decode step of its own."""
    driver.step({"row": ids[:100]} | others)
    steps = [driver.step({}, {"row": token} | dict.fromkeys(others, token)) for token in ids[100:]]
    return torch.cat([step["row"] for step in steps])
