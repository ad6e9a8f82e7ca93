"""What a GPU runs before it serves is within the settings and leaves no kernel of theirs to its first request.

Here on a CPU: sizes alone are looked at, as a GPU's kernels are chosen by them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from plait_worker import rehearsal, working_space
from plait_worker.attention.torch import TorchAttention
from plait_worker.cache import KVCache
from plait_worker.models import load_model
from plait_worker.parallel import Parallel
from plait_worker.rows import Rows
from tiny_models import config_for, save_tiny_llama
from torch import Tensor

CPU = torch.device("cpu")


class Noting(TorchAttention):
    """Keeps the steps that it prepares."""

    steps: list[Rows]

    def prepare(self, rows: Rows):  # type: ignore[no-untyped-def]
        """See ``TorchAttention``."""
        self.steps.append(rows)
        return super().prepare(rows)


LIMITS = pytest.mark.parametrize(
    ("max_batch_tokens", "max_seqs", "max_model_len"), [(600, 50, 250), (128, 1, 512), (7, 3, 512), (1, 1, 1)]
)


@LIMITS
def test_the_largest_steps_are_as_large_as_the_settings_allow_and_pick_in_every_way(
    max_batch_tokens: int, max_seqs: int, max_model_len: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = {"max_batch_tokens": max_batch_tokens, "max_seqs": max_seqs, "max_model_len": max_model_len}
    started = Started(tmp_path, limits)
    picked = Counter[tuple[str, int]]()
    for name in ("pick_greedy", "pick_random", "pick_filtered"):
        monkeypatch.setattr(working_space, name, counted(getattr(working_space, name), name, picked))
    with torch.inference_mode():
        working_space.run_largest_steps(started.config, started.model, started.attention, started.cache)
    assert started.largest_step() == max_batch_tokens
    most = min(max_seqs, max_batch_tokens)
    assert set(picked) == {("pick_greedy", most), ("pick_random", most), ("pick_filtered", most)}


@LIMITS
def test_every_size_that_kernels_are_chosen_by_is_rehearsed_within_the_settings(
    max_batch_tokens: int, max_seqs: int, max_model_len: int, tmp_path: Path
) -> None:
    limits = {"max_batch_tokens": max_batch_tokens, "max_seqs": max_seqs, "max_model_len": max_model_len}
    started = Started(tmp_path, limits)
    rehearsal.run_steps(started.config, started.model, started.attention, started.cache)
    assert started.largest_step() == min(max(128, max_seqs), max_batch_tokens)
    decoded = [rows.num_rows for rows in started.attention.steps if rows.num_prefill == 0]
    most = min(max_seqs, max_batch_tokens)
    assert decoded == [*(1 << power for power in range(10) if 1 << power < most), most]


class Started:
    """A model with these limits, and the steps that it has run."""

    def __init__(self, folder: Path, limits: dict[str, int]) -> None:
        save_tiny_llama(folder)
        self.config = config_for(folder, folder, **limits)
        self.model = load_model(folder, "float32", CPU, Parallel())
        self.attention = Noting(self.model.attention_shape, self.config.page_size)  # type: ignore[arg-type]
        self.attention.steps = []
        self.cache = KVCache(self.model.cache_spec, 1, self.config.page_size, CPU)

    def largest_step(self) -> int:
        """Its tokens; no step is more than the settings allow."""
        for rows in self.attention.steps:
            assert len(rows.lengths) <= max(self.config.max_seqs, -(-rows.num_tokens // self.config.max_model_len))
            assert int(rows.positions_T.max()) < self.config.max_model_len
        return max(rows.num_tokens for rows in self.attention.steps)


def counted(pick: Callable[..., Tensor], name: str, counts: Counter[tuple[str, int]]) -> Callable[..., Tensor]:
    """``pick``, with its name and rows counted."""

    def run(logits_SV: Tensor, *others: object) -> Tensor:
        counts[name, len(logits_SV)] += 1
        return pick(logits_SV, *others)

    return run
