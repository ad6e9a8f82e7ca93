"""Random weights are one model, at every start and on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from plait_testing.attention_cases import cpu_attention
from plait_testing.rank_threads import on_every_rank
from plait_worker.cache import KVCache
from plait_worker.models.loader import dummy_model
from plait_worker.parallel import Parallel
from plait_worker.rows import Rows
from plait_worker.weights.dummy import DummyWeights

CPU = torch.device("cpu")
IDS = [5, 9, 2, 44, 17, 3]


def logits(path: Path, parallel: Parallel) -> torch.Tensor:
    model = dummy_model(path, "float32", CPU, parallel, free_bytes=1 << 30)
    cache = KVCache(model.cache_specs, 2, 8, CPU)
    ids, positions = torch.tensor(IDS), torch.arange(len(IDS))
    table, last = torch.tensor([[1, 0, 0, 0]], dtype=torch.int32), torch.tensor([len(IDS) - 1])
    rows = Rows(1, [0], [0], [len(IDS)], ids, positions, table, last)
    attention = cpu_attention(model.attention_specs, 8, 4)
    return model.logits(model.forward(rows, cache, attention.prepare(rows)))


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "deepseek_v3"])
def test_random_weights_are_the_same_model_on_any_number_of_ranks(
    family: str, save_tiny: Callable[..., Any], tmp_path: Path
) -> None:
    changes = {"num_attention_heads": 8, "num_key_value_heads": 8}
    path = save_tiny(family, **changes).path
    alone = logits(path, Parallel())
    assert alone.std() > 0
    for together in on_every_rank(2, tmp_path, lambda parallel: logits(path, parallel)):
        torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-4)


def test_a_tensor_is_drawn_by_its_name() -> None:
    weights = DummyWeights(torch.bfloat16, CPU)
    whole = weights.with_prefix("model.layers.3").take("q_proj.weight", (64, 32))
    below = DummyWeights(torch.bfloat16, CPU).with_prefix("model").with_prefix("layers.3")
    assert torch.equal(below.take("q_proj.weight", (64, 32), rows=range(16, 32)), whole[16:32])
    assert torch.equal(below.take("q_proj.weight", (64, 32), columns=range(8, 16)), whole[:, 8:16])
    assert not torch.equal(weights.with_prefix("model.layers.4").take("q_proj.weight", (64, 32)), whole)


def test_random_weights_are_said_to_be_random(save_tiny: Callable[..., Any], caplog: pytest.LogCaptureFixture) -> None:
    dummy_model(save_tiny("llama").path, "float32", CPU, Parallel())
    assert [record.levelname for record in caplog.records if "random" in record.message] == ["WARNING"]
