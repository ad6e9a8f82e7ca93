"""One row's first norm and the product behind it are one call where a kernel takes both, and give the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from plait_kernels.linear import normed_multiply_row
from plait_worker.layers.matrix import GpuMatrix
from torch import Tensor


@pytest.mark.parametrize("changes", [{}, {"q_lora_rank": None}], ids=["queries by a latent", "direct queries"])
def test_a_norm_goes_with_its_product_for_one_row(
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
        return normed_multiply_row(x_1I, *given)

    monkeypatch.setattr("plait_worker.models.fused.normed_multiply_row", counted)
    ids = [3, 9, 27, 20, 60, 58, 52, 34]
    given, right = ([driver.step({"a": ids})["a"], driver.step({}, {"a": 5})["a"]] for driver in (together, apart))
    assert rows == [1] * len(together.model.blocks)
    torch.testing.assert_close(torch.cat(given), torch.cat(right), atol=0.02, rtol=0)
