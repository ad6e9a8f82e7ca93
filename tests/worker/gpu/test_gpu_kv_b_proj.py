"""The kv_b_proj up-projection at the kernels' own sizes, against float64."""

import pytest
import torch
from plait_testing.gpu_driver import GPU
from plait_worker.layers.kv_b_proj import SingleGemmKvUp
from plait_worker.model_config import MlaConfig

pytestmark = [pytest.mark.gpu, pytest.mark.acceptance("gpu-mla")]
MLA = MlaConfig(None, 512, 128, 64, 128, scale=1.0, is_interleaved=False)
TOLERANCE = 2**-7


@pytest.mark.parametrize("num_heads", [16, 128])
@pytest.mark.parametrize("num_tokens", [1, 17, 300, 4096])
def test_one_gemm_makes_keys_and_values_and_copies_the_shared_key_exactly(num_tokens: int, num_heads: int) -> None:
    torch.manual_seed(0)
    up_HXL = (torch.randn(num_heads, 256, 512, device=GPU) * 512**-0.5).bfloat16()
    latent_NC = torch.randn(num_tokens, 576, device=GPU).bfloat16()
    expand = SingleGemmKvUp(up_HXL, MLA)
    key_NHE, value_NHV = expand(latent_NC)
    right_NHX = torch.einsum("nl,hxl->nhx", latent_NC[:, :512].double(), up_HXL.double())
    for given, right in ((key_NHE[..., :128], right_NHX[..., :128]), (value_NHV, right_NHX[..., 128:])):
        assert float((given.double() - right).abs().max() / right.abs().max()) <= TOLERANCE
    assert torch.equal(key_NHE[..., 128:], latent_NC[:, None, 512:].expand(-1, num_heads, -1))
    assert torch.equal(torch.cat((expand.key_HOL, expand.value_HVL), dim=1), up_HXL)
