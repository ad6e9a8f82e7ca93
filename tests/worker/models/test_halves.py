"""Ranks that sum half the rows of a step while they compute the other half compute what one rank computes alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from plait_kernels.linear import GpuMatrix
from plait_kernels.norm import add_rms_norm
from plait_testing.rank_threads import on_every_rank
from plait_worker import peers
from plait_worker.cache import KVCache
from plait_worker.layers.norm import BlockNorm
from plait_worker.models.block import Step
from plait_worker.models.halves import HalvedStack
from plait_worker.models.loader import load_model
from plait_worker.parallel import Parallel
from torch import Tensor

LAYERS, WIDTH, PROJECTED = 3, 48, 8


@dataclass
class GlooSums:
    """Stands for ``CopiedAllReduce`` on a CPU, and like it takes two sums at a time."""

    parallel: Parallel
    begun: list[int] = field(default_factory=list)
    """Rows of each."""
    num_finished: int = 0

    def supports(self, partial_ND: Tensor) -> bool:
        return partial_ND.shape[0] > 0

    def begin(self, partial_ND: Tensor) -> Tensor:
        self.begun.append(partial_ND.shape[0])
        assert len(self.begun) - self.num_finished <= 2
        return self.parallel.all_reduce(partial_ND.clone())

    def finish(
        self, total_ND: Tensor, residual_ND: Tensor, weight_D: Tensor, eps: float, place: int
    ) -> tuple[Tensor, Tensor]:
        self.num_finished += 1
        return add_rms_norm(total_ND, residual_ND, weight_D, eps)


@dataclass
class ToyBlock:
    """Attention is the mean of the tokens so far; a rank's partial sums are its share of whole ones."""

    attention_norm: BlockNorm
    mlp_norm: BlockNorm
    projection: GpuMatrix
    back: Tensor
    world: int

    def attend(self, projected_TO: Tensor, step: Step[Any], pages: Tensor) -> Tensor:
        return projected_TO.cumsum(dim=0) / torch.arange(1, len(projected_TO) + 1)[:, None]

    def output(self, attended_TO: Tensor) -> Tensor:
        return attended_TO @ self.back / self.world

    def mlp(self, x_TD: Tensor) -> Tensor:
        return x_TD.tanh() / self.world

    def __call__(self, x_TD: Tensor, residual_TD: Tensor) -> tuple[Tensor, Tensor]:
        x_TD, residual_TD = self.attention_norm.add(x_TD, residual_TD)
        attended_TO = self.attend(self.projection(x_TD), STEP, torch.empty(0))
        x_TD, residual_TD = self.mlp_norm.add(self.output(attended_TO), residual_TD)
        return self.mlp(x_TD), residual_TD


STEP = Step(torch.empty(0), torch.empty(0), None)


def toy(path: Path, parallel: Parallel) -> tuple[list[ToyBlock], BlockNorm, KVCache]:
    """Blocks with the norms of a tiny model."""
    model: Any = load_model(path, "float32", torch.device("cpu"), parallel)
    drawn = torch.Generator().manual_seed(0)
    blocks = [
        ToyBlock(
            block.attention_norm,
            block.mlp_norm,
            GpuMatrix(torch.randn(PROJECTED, WIDTH, generator=drawn), None),
            torch.randn(PROJECTED, WIDTH, generator=drawn),
            parallel.world,
        )
        for block in model.blocks
    ]
    return blocks, model.norm, KVCache(model.cache_specs, 4, 4, torch.device("cpu"))


@pytest.mark.parametrize("num_rows", [3, 8])
def test_halves_of_a_step_on_two_ranks_are_what_one_rank_computes(
    num_rows: int, save_tiny: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "LEAST_HIDDEN", 3)
    path = save_tiny("llama").path
    x_TD = torch.randn(num_rows, WIDTH, generator=torch.Generator().manual_seed(1))

    def alone() -> Tensor:
        blocks, norm, _ = toy(path, Parallel())
        hidden_TD, residual_TD = x_TD, torch.zeros_like(x_TD)
        for block in blocks:
            hidden_TD, residual_TD = block(hidden_TD, residual_TD)
        return norm.add(hidden_TD, residual_TD)[0]

    def halved(parallel: Parallel) -> tuple[Tensor, list[int]]:
        sums = GlooSums(parallel)
        parallel.peers.copied = sums  # type: ignore[assignment]
        blocks, norm, cache = toy(path, parallel)
        stack = HalvedStack(blocks, norm)
        assert stack.hides(x_TD)
        assert not stack.hides(x_TD[:2])
        return stack.forward(x_TD / 2, [STEP] * len(blocks), cache), sums.begun

    for together, begun in on_every_rank(2, tmp_path, halved):
        torch.testing.assert_close(together, alone(), atol=1e-4, rtol=1e-4)
        assert begun == [-(-num_rows // 2), num_rows // 2] * (2 * LAYERS + 1)
