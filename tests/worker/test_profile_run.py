"""The profile run stays within the settings and runs every sampler."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from plait_testing.tiny_models import config_for, save_tiny_llama
from plait_worker import profile_run
from plait_worker.attention.backend import requirements_for
from plait_worker.attention.mha.torch_mha import TorchMha
from plait_worker.attention.model_attention import ModelAttention
from plait_worker.cache import KVCache
from plait_worker.graph_sizes import capture_sizes
from plait_worker.models.loader import load_model
from plait_worker.parallel import Parallel
from plait_worker.rows import Rows
from torch import Tensor

CPU = torch.device("cpu")


class Noting(TorchMha):
    """Keeps the steps that it prepares."""

    steps: list[Rows]

    def prepare(self, rows: Rows):  # type: ignore[no-untyped-def]
        """See ``TorchMha``."""
        self.steps.append(rows)
        return super().prepare(rows)


@pytest.mark.parametrize(
    ("max_batch_tokens", "max_seqs", "max_model_len"), [(600, 50, 250), (128, 1, 512), (7, 3, 512), (1, 1, 1)]
)
def test_the_largest_steps_are_as_large_as_the_settings_allow_and_sample_in_every_mode(
    max_batch_tokens: int, max_seqs: int, max_model_len: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny_llama(tmp_path)
    limits = {"max_batch_tokens": max_batch_tokens, "max_seqs": max_seqs, "max_model_len": max_model_len}
    config = config_for(tmp_path, tmp_path, **limits)
    model = load_model(tmp_path, "float32", CPU, Parallel())
    (requirements,) = requirements_for(model.attention_specs, config.pages.page_size, 0, 0, CPU)
    attention = Noting(requirements)  # type: ignore[arg-type]
    attention.steps = []
    cache = KVCache(model.cache_specs, 1, config.pages.page_size, CPU)
    sampled = Counter[tuple[str, int]]()
    for name in ("sample_greedy", "sample_random", "sample_filtered"):
        monkeypatch.setattr(profile_run, name, counted(getattr(profile_run, name), name, sampled))
    with torch.inference_mode():
        profile_run.run_largest_steps(config, model, ModelAttention([attention]), cache)
    assert max(rows.num_tokens for rows in attention.steps) == max_batch_tokens
    for rows in attention.steps:
        assert len(rows.lengths) <= max(max_seqs, -(-max_batch_tokens // max_model_len))
        assert int(rows.positions_T.max()) < max_model_len
    most = min(max_seqs, max_batch_tokens)
    assert set(sampled) == {("sample_greedy", most), ("sample_random", most), ("sample_filtered", most)}


def counted(sampler: Callable[..., Tensor], name: str, counts: Counter[tuple[str, int]]) -> Callable[..., Tensor]:
    """``sampler``, with its name and rows counted."""

    def run(logits_SV: Tensor, *others: object) -> Tensor:
        counts[name, len(logits_SV)] += 1
        return sampler(logits_SV, *others)

    return run


def test_graphs_of_whole_token_budgets_are_counted_beside_the_largest_step() -> None:
    small, large = capture_sizes(8, 4096 - 128, (0,)), capture_sizes(8, 8192, (0,))
    assert profile_run._graph_bytes([], 7) == 0
    assert profile_run._graph_bytes(small, 7) + 7 == profile_run._graph_bytes(large, 7)
