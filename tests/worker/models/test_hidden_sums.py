"""Ranks that sum some rows of a step while they compute others compute what one rank computes alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from plait_kernels.collective import row_parts
from plait_kernels.norm import add_rms_norm
from plait_testing.rank_threads import on_every_rank
from plait_worker import peers
from plait_worker.cache import KVCache
from plait_worker.layers.norm import BlockNorm
from plait_worker.models.block import Step
from plait_worker.models.hidden_sums import HiddenSums
from plait_worker.models.loader import load_model
from plait_worker.parallel import Parallel
from torch import Tensor

LAYERS, WIDTH, PROJECTED = 3, 48, 8


@dataclass
class GlooSums:
    """Stands for ``CopiedAllReduce`` on a CPU: the GEMM makes two parts, before either is summed."""

    parallel: Parallel

    def supports(self, x_ND: Tensor) -> bool:
        return x_ND.shape[0] > 0

    def add_rms_norm(
        self,
        gemm: Callable[[Tensor], Tensor],
        x_NI: Tensor,
        residual_ND: Tensor,
        weight_D: Tensor,
        eps: float,
        place: int,
    ) -> tuple[Tensor, Tensor]:
        partials = [gemm(part) for part in x_NI.split([1, len(x_NI) - 1])]
        total_ND = torch.cat([self.parallel.all_reduce(partial.clone()) for partial in partials])
        return add_rms_norm(total_ND, residual_ND, weight_D, eps)


@dataclass
class ToyBlock:
    """Attention is the mean of the tokens so far; a rank's partial sums are its share of whole ones."""

    attention_norm: BlockNorm
    mlp_norm: BlockNorm
    projection: Tensor
    back: Tensor
    world: int

    def attend(self, normed_TD: Tensor, step: Step[Any], pages: Tensor) -> Tensor:
        projected_TO = normed_TD @ self.projection.T
        return projected_TO.cumsum(dim=0) / torch.arange(1, len(projected_TO) + 1)[:, None]

    def output(self, attended_NI: Tensor) -> Tensor:
        return attended_NI @ self.back / self.world

    def gate_up(self, x_TD: Tensor) -> Tensor:
        return x_TD.tanh()

    def gated_down(self, gate_up_NO: Tensor) -> Tensor:
        return gate_up_NO.square() / self.world

    def __call__(self, x_TD: Tensor, residual_TD: Tensor) -> tuple[Tensor, Tensor]:
        x_TD, residual_TD = self.attention_norm.add(x_TD, residual_TD)
        attended_TI = self.attend(x_TD, STEP, torch.empty(0))
        x_TD, residual_TD = self.mlp_norm.add(self.output(attended_TI), residual_TD)
        return self.gated_down(self.gate_up(x_TD)), residual_TD


STEP = Step(torch.empty(0), torch.empty(0), None)


def toy(path: Path, parallel: Parallel) -> tuple[list[ToyBlock], BlockNorm, KVCache]:
    """Blocks with the norms of a tiny model."""
    model: Any = load_model(path, "float32", torch.device("cpu"), parallel)
    drawn = torch.Generator().manual_seed(0)
    blocks = [
        ToyBlock(
            block.attention_norm,
            block.mlp_norm,
            torch.randn(PROJECTED, WIDTH, generator=drawn),
            torch.randn(PROJECTED, WIDTH, generator=drawn),
            parallel.world,
        )
        for block in model.blocks
    ]
    return blocks, model.norm, KVCache(model.cache_specs, 4, 4, torch.device("cpu"))


@pytest.mark.parametrize("num_rows", [3, 8])
def test_parts_of_a_step_on_two_ranks_are_what_one_rank_computes(
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

    def in_parts(parallel: Parallel) -> Tensor:
        parallel.peers.copied = GlooSums(parallel)  # type: ignore[assignment]
        blocks, norm, cache = toy(path, parallel)
        stack = HiddenSums(blocks, norm)
        assert stack.takes(x_TD)
        assert not stack.takes(x_TD[:2])
        return stack.forward(x_TD / 2, [STEP] * len(blocks), cache)

    for together in on_every_rank(2, tmp_path, in_parts):
        torch.testing.assert_close(together, alone(), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("num_rows", [1, 128, 300, 4096, 5000, 8192])
@pytest.mark.parametrize("width", [48, 2048, 4096, 16_384, 100_000])
def test_parts_are_all_rows_in_no_more_waves_of_tiles_than_the_whole(num_rows: int, width: int) -> None:
    parts = row_parts(num_rows, width, 132)
    assert [parts[0].start, *(part.stop for part in parts)] == [*(part.start for part in parts), num_rows]
    assert len(parts) <= 3
    columns = -(-width // 256)
    if columns <= 132:
        assert sum(waves(part.stop - part.start, columns) for part in parts) <= waves(num_rows, columns)


def waves(num_rows: int, columns: int) -> int:
    return -(-(-(-num_rows // 128) * columns) // 132)
