"""A layer's experts are in memory once, however many there are."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import torch
from plait_testing.counting_model import CountingModel
from plait_worker.layers.mlp import SparseMlp
from plait_worker.model_config import MoeConfig
from plait_worker.parallel import Parallel
from plait_worker.weights.dummy import DummyWeights
from torch import Tensor

HIDDEN = 64
MOE = MoeConfig(num_experts=16, num_experts_per_token=2, intermediate_size=32, normalise_top_k=True)


class Watched(DummyWeights):
    """Knows the most of its tensors that were there at a time."""

    most = 0
    taken: tuple[weakref.ref[Tensor], ...] = ()

    def take(self, *wanted: Any, **cut: Any) -> Tensor:
        tensor = super().take(*wanted, **cut)
        self.taken = (*self.taken, weakref.ref(tensor))
        self.most = max(self.most, sum(each() is not None for each in self.taken))
        return tensor


def test_an_expert_is_copied_before_the_one_after_the_next_is_read() -> None:
    weights = Watched(torch.float32, torch.device("cpu"))
    SparseMlp(replace(CountingModel().config, hidden_size=HIDDEN), MOE, weights, Parallel())
    assert len(weights.taken) == 1 + 3 * MOE.num_experts
    assert weights.most < 8, "the router's matrix, and those of two experts"
