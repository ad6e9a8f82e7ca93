"""Random DeepSeek models at the kernels' own sizes, in bfloat16, teacher-forced against float32.

A backend may differ from float32 hardly more than the torch backend does: both round the same values.
"""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from plait_testing import recall
from plait_testing.gpu_driver import (
    GPU,
    NUM_TOKENS,
    PAGE_SIZE,
    divergence,
    logprobs,
    save_deepseek,
)
from plait_testing.recording import Record
from plait_worker.attention.backend import AttentionBackend, BackendRequirements
from plait_worker.attention.mla.torch_mla import TorchMla
from plait_worker.attention.registry import names
from plait_worker.attention.selection import try_backend
from plait_worker.attention.spec import MlaShape
from plait_worker.models.loader import load_model
from plait_worker.models.model import Model
from plait_worker.parallel import Parallel
from plait_worker.weights.cache_scales import Fp8Cache
from torch import Tensor

pytestmark = pytest.mark.gpu
CONTEXT_CHUNK = 1024
LIMITS = {"median": 1.5, "p99": 1.5}
LIMITS_TRAINED = {"median": 1.5, "p99": 4.0}
# FlashMLA rounds queries and the softmax's weights to float8 where the pages are float8.
LIMIT_FLASHMLA_FP8 = 4.0
FP8_SCALES = Fp8Cache(0.37, 1.0)
STATISTICS = {"median": 0.5, "p99": 0.99, "mean": None}
"""By the quantile that each is; None of the mean."""


def backend_requirements(model: Model[Any]) -> BackendRequirements[Any]:
    return BackendRequirements(model.attention_specs[0], PAGE_SIZE, CONTEXT_CHUNK, 2 * NUM_TOKENS, GPU)


def torch_attention(model: Model[Any]) -> TorchMla:
    return TorchMla(backend_requirements(model))


@pytest.mark.acceptance("gpu-mla")
@pytest.mark.parametrize(("num_heads", "q_rank"), [(16, None), (128, 256)])
def test_backends_round_no_worse_than_torch(num_heads: int, q_rank: int | None, tmp_path: Path, record: Record) -> None:
    save_deepseek(tmp_path, num_heads, q_rank)
    ids = torch.randint(2048, (NUM_TOKENS,), generator=torch.Generator().manual_seed(num_heads)).tolist()
    exact = load_model(tmp_path, "float32", GPU, Parallel())
    right = logprobs(exact, torch_attention(exact), ids)
    for fp8, kind in ((None, ""), (FP8_SCALES, " float8")):
        model = load_model(tmp_path, "bfloat16", GPU, Parallel(), fp8=fp8)
        hold_against_torch(model, ids, right, f"{num_heads} heads{kind}", record)


def hold_against_torch(
    model: Model[Any],
    ids: list[int],
    right: tuple[Tensor, Tensor],
    what: str,
    record: Record,
    limits: dict[str, float] = LIMITS,
) -> None:
    """Every backend's divergence from ``right`` against the torch backend's, of prefill and of decode steps."""
    of_torch = divergences(right, logprobs(model, torch_attention(model), ids))
    for case, value in of_torch.items():
        record(f"torch {what} {case[0]}", f"kl_{case[1]}", "nats", value)
    for name in names(MlaShape.kind, (9, 0)):
        for case, value in divergences(right, logprobs(model, attention_of(name, model), ids)).items():
            most = limits.get(case[1], math.inf)
            if name == "flashmla" and "float8" in what:
                most = max(most, LIMIT_FLASHMLA_FP8)
            goal = most * of_torch[case] if most < math.inf else None
            record(f"{name} {what} {case[0]}", f"kl_{case[1]}", "nats", value, goal)
            assert goal is None or value <= goal


def attention_of(name: str, model: Model[Any]) -> AttentionBackend[Any]:
    outcome = try_backend(name, backend_requirements(model))
    assert not isinstance(outcome, str), outcome
    return outcome


def divergences(right: tuple[Tensor, Tensor], given: tuple[Tensor, Tensor]) -> dict[tuple[str, str], float]:
    """By prefill and decode steps, then by statistic."""
    found = {kind: divergence(*both) for kind, *both in zip(("prefill", "decode"), right, given, strict=True)}
    return {
        (kind, statistic): float(kl.mean() if quantile is None else kl.quantile(quantile))
        for kind, kl in found.items()
        for statistic, quantile in STATISTICS.items()
    }


@pytest.mark.acceptance("gpu-mla")
def test_float8_latents_of_a_trained_model_are_told_from_float32(check_models: Path, record: Record) -> None:
    """Rounding turns single tokens to other experts: what they make of the mean is recorded, and held to nothing."""
    path = check_models / "recall-mla"
    ids = dialogue(path)
    exact = load_model(path, "float32", GPU, Parallel())
    right = logprobs(exact, torch_attention(exact), ids)
    for fp8, kind in ((None, ""), (FP8_SCALES, " float8")):
        model = load_model(path, "bfloat16", GPU, Parallel(), fp8=fp8)
        given = logprobs(model, torch_attention(model), ids)
        same = float((given[0].argmax(-1) == right[0].argmax(-1)).float().mean())
        record(f"torch recall-mla{kind} prefill", "share_of_best_tokens_kept", "share", same)
        hold_against_torch(model, ids, right, f"recall-mla{kind}", record, LIMITS_TRAINED)


def dialogue(path: Path) -> list[int]:
    """The first tokens of what was asked about a table, with the answers."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    asked = recall.about_one_table(seed=3, num=60, context=4000)
    turns = "".join(f"{problem['messages'][1]['content']} {problem['answer']} " for problem in asked)
    ids: list[int] = tokenizer.encode(asked[0]["messages"][0]["content"] + " " + turns)
    assert len(ids) >= NUM_TOKENS
    return ids[:NUM_TOKENS]
