"""The kv_b_proj up-projection: one GEMM gives what a GEMM and two copies give."""

from __future__ import annotations

import pytest
import torch
from plait_worker.layers.kv_b_proj import ConcatKvUp, SingleGemmKvUp
from plait_worker.model_config import MlaConfig

DIMS = {"recall": (3, 64, 32, 16, 48), "odd": (2, 10, 6, 4, 5)}


@pytest.mark.parametrize("dims", DIMS.values(), ids=DIMS)
@pytest.mark.parametrize("num_tokens", [0, 1, 37])
def test_one_product_makes_keys_and_values_and_brings_the_shared_key_to_each_head(
    num_tokens: int, dims: tuple[int, int, int, int, int]
) -> None:
    num_heads, latent_dim, nope_dim, rope_dim, value_dim = dims
    mla = MlaConfig(None, latent_dim, nope_dim, rope_dim, value_dim, scale=1.0, is_interleaved=False)
    up_HXL = torch.randn(num_heads, nope_dim + value_dim, latent_dim, generator=torch.Generator().manual_seed(0))
    latent_NC = torch.randn(num_tokens, mla.cached_dim, generator=torch.Generator().manual_seed(1))
    joined, whole = ConcatKvUp(up_HXL, mla), SingleGemmKvUp(up_HXL, mla)
    for given, right in zip(whole(latent_NC), joined(latent_NC), strict=True):
        torch.testing.assert_close(given, right, atol=1e-5, rtol=1e-5)
    key_NHE, _ = whole(latent_NC)
    assert torch.equal(key_NHE[..., nope_dim:], latent_NC[:, None, latent_dim:].expand(-1, num_heads, -1))
    assert torch.equal(whole.key_HOL, joined.key_HOL)
    assert torch.equal(whole.value_HVL, joined.value_HVL)


def test_zeros_and_the_unit_matrix_are_counted() -> None:
    mla = MlaConfig(None, 8, 4, 2, 6, scale=1.0, is_interleaved=False)
    whole = SingleGemmKvUp(torch.ones(3, 10, 8), mla)
    assert whole.num_more_bytes == 4 * 3 * (12 * 10 - 10 * 8)
