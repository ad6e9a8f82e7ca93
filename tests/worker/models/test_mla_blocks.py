"""One row's norms are fused with the GEMVs after them if a kernel does both; results are the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from plait_kernels.linear import ExactOnGpu, GpuMatrix, rmsnorm_gemv, rmsnorm_router_gemv
from plait_worker.layers.mlp import SparseMlp
from torch import Tensor


@pytest.mark.parametrize("changes", [{}, {"q_lora_rank": None}], ids=["queries by a latent", "direct queries"])
def test_a_norm_is_fused_with_its_gemv_for_one_row(
    changes: dict[str, Any],
    save_tiny: Callable[..., Any],
    drive: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = save_tiny("deepseek_v2", **changes).path
    apart, together = (drive(path, dtype="float16") for _ in range(2))
    for block in together.model.blocks:
        first = block.attention.inputs.first
        first.multiply = GpuMatrix(first.multiply.weight_OI, None)
    rows = []

    def counted(x_1I: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
        rows.append(len(x_1I))
        return rmsnorm_gemv(x_1I, *given)

    monkeypatch.setattr("plait_worker.models.fused.rmsnorm_gemv", counted)
    ids = [3, 9, 27, 20, 60, 58, 52, 34]
    given, right = ([driver.step({"a": ids})["a"], driver.step({}, {"a": 5})["a"]] for driver in (together, apart))
    assert rows == [1] * len(together.model.blocks)
    torch.testing.assert_close(torch.cat(given), torch.cat(right), atol=0.02, rtol=0)


class _Exact(ExactOnGpu):
    """As on a GPU, but for its multiplying, which a CPU's torch cannot."""

    def __call__(self, x_NI: Tensor) -> Tensor:
        return torch.nn.functional.linear(x_NI.float(), self.rounded_OI.float())


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_a_norm_is_fused_with_its_router_for_one_row(
    family: str, save_tiny: Callable[..., Any], drive: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, router = save_tiny(family).path, "plait_worker.layers.router"
    monkeypatch.setattr(f"{router}.exact_matrix", lambda weight: _Exact(weight, weight.bfloat16()).__call__)
    apart = drive(path, dtype="bfloat16")
    monkeypatch.setattr(f"{router}.exact_matrix", lambda weight: _Exact(weight, weight.bfloat16()))
    together = drive(path, dtype="bfloat16")
    rows = []

    def counted(x_1I: Tensor, *given: Any) -> tuple[Tensor, Tensor, Tensor]:
        rows.append(len(x_1I))
        return rmsnorm_router_gemv(x_1I, *given)

    monkeypatch.setattr(f"{router}.rmsnorm_router_gemv", counted)
    ids = [3, 9, 27, 20, 60, 58, 52, 34]
    given, right = ([driver.step({"a": ids})["a"], driver.step({}, {"a": 5})["a"]] for driver in (together, apart))
    assert rows == [1] * sum(isinstance(block.mlp, SparseMlp) for block in together.model.blocks)
    assert rows
    torch.testing.assert_close(torch.cat(given), torch.cat(right), atol=0, rtol=0)
