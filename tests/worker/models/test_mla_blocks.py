"""One row's norms are fused with the GEMVs after them if a kernel does both; results are the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from plait_kernels.linear import (
    ExactOnGpu,
    Fp8Rows,
    GpuMatrix,
    RowNorm,
    add_rms_norm_quantise,
    rmsnorm_gemv,
    rmsnorm_router_gemv,
)
from plait_kernels.moe import Fp8Experts
from plait_worker.layers.mlp import SparseMlp
from plait_worker.models import loader
from plait_worker.parallel import Parallel
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


def test_a_norm_quantises_for_experts_in_fp8_of_more_rows_than_two(
    save_tiny: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "fp8_unsupported_reason", lambda _device, _dtype: None)
    path = save_tiny("deepseek_v2", moe_intermediate_size=48).path
    model: Any = loader.load_model(path, "bfloat16", torch.device("cpu"), Parallel(), quantises=True)
    blocks = [block for block in model.blocks if isinstance(block.mlp, SparseMlp)]
    assert blocks
    assert all(isinstance(block.mlp.experts, Fp8Experts) for block in blocks)
    rows = []

    def counted(x_NI: Tensor, norm: RowNorm, *, is_grouped: bool) -> tuple[Tensor, Fp8Rows, Tensor]:
        rows.append(len(x_NI))
        return add_rms_norm_quantise(x_NI, norm, is_grouped=is_grouped)

    monkeypatch.setattr("plait_worker.layers.mlp.add_rms_norm_quantise", counted)
    for block in blocks:
        for num_rows in (1, 2, 3, 70):
            x_TD, residual_TD = torch.randn(2, num_rows, len(block.mlp_norm.weight_D)).bfloat16()
            normed_TD, right_sum_TD = block.mlp_norm.add(x_TD, residual_TD)
            given_TD, sum_TD = block.mlp.with_norm(x_TD, residual_TD, block.mlp_norm)
            assert torch.equal(given_TD, block.mlp(normed_TD))
            assert torch.equal(sum_TD, right_sum_TD)
    assert rows == [3, 70] * len(blocks)
