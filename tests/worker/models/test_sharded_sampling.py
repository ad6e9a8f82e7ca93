"""Ranks sample their own rows, and together the tokens that one rank samples from whole logits."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from plait_proto import NewSlot
from plait_testing.rank_threads import on_every_rank
from plait_worker.attention.model_attention import ModelAttention
from plait_worker.cache import KVCache
from plait_worker.models.loader import load_model
from plait_worker.parallel import Parallel
from plait_worker.rank import Rank
from plait_worker.slots import Slots

CPU = torch.device("cpu")
SAMPLED = [(0.0, 0, 1.0), (1.0, 0, 1.0), (1.0, 9, 1.0), (0.7, 0, 0.9), (1.0, 0, 1.0)]
"""Temperature, top-k and top-p of each slot."""


def sampled(path: Path, parallel: Parallel, num_rows: int, logprobs: int | None) -> tuple[list[int], int]:
    """The tokens of so many rows, and how many log-probability records this rank made."""
    model = load_model(path, "float32", CPU, parallel)
    slots = Slots(len(SAMPLED), 4, 4, 16, CPU)
    new = [
        NewSlot(slot, 0, temperature, top_k, top_p, 0.0, 7 + slot, logprobs, None)
        for slot, (temperature, top_k, top_p) in enumerate(SAMPLED)
    ]
    slots.sampling.assign(new)
    rank = Rank(model, KVCache(model.cache_specs, 4, 4, CPU), ModelAttention([]), slots, parallel)
    hidden = torch.randn(num_rows, model.config.hidden_size, generator=torch.Generator().manual_seed(num_rows))
    ids, records = rank._sample(model.shard_logits(hidden), np.arange(num_rows))
    return ids.tolist(), len(records)


@pytest.mark.parametrize("num_rows", [1, 2, 5])
@pytest.mark.parametrize("world", [2, 3])
def test_the_tokens_of_divided_rows_are_those_of_one_rank(
    world: int, num_rows: int, save_tiny: Callable[..., Any], tmp_path: Path
) -> None:
    path = save_tiny("llama", num_key_value_heads=3, intermediate_size=96).path
    alone, _ = sampled(path, Parallel(), num_rows, None)
    assert len(alone) == num_rows
    for together, _ in on_every_rank(world, tmp_path, lambda parallel: sampled(path, parallel, num_rows, None)):
        assert together == alone


def test_rank_0_makes_the_records_of_rows_that_want_log_probabilities(
    save_tiny: Callable[..., Any], tmp_path: Path
) -> None:
    path = save_tiny("llama", num_key_value_heads=3, intermediate_size=96).path
    alone, _ = sampled(path, Parallel(), 5, 2)
    together = on_every_rank(2, tmp_path, lambda parallel: sampled(path, parallel, 5, 2))
    assert together == [(alone, 1), (alone, 0)]
