"""MLA on a CPU against float64: the torch backend, reference of the others, and the compiled kernels."""

from __future__ import annotations

import pytest
import torch
from plait_kernels.kv_cache import FP8
from plait_testing.attention_cases import CPU, MlaCase, mla_shape
from plait_worker.attention.backend import BackendRequirements
from plait_worker.attention.mla.cpu_mla import CpuMla
from plait_worker.attention.mla.torch_mla import TorchMla

PREFILL = [(0, 40), (130, 2), (70, 33), (0, 2)]
DECODE = [(start, 1) for start in (0, 1, 31, 32, 33, 130)]


# A prompt's new tokens see each other as they are, later ones see what the pages kept.
@pytest.mark.parametrize(
    ("dtype", "scale", "tolerance"), [(torch.bfloat16, 1.0, 0.01), (FP8, 1.0, 0.04), (FP8, 0.37, 0.04)]
)
def test_rows_attend_to_what_the_pages_keep(dtype: torch.dtype, scale: float, tolerance: float) -> None:
    shape = mla_shape(2, cached_dtype=dtype, cached_scale=scale)
    assert MlaCase(shape, PREFILL, DECODE).error(TorchMla(BackendRequirements(shape, 32, 25, 0, CPU))) <= tolerance


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_compiled_kernels_absorb_short_appends_between_prompts(dtype: torch.dtype) -> None:
    shape = mla_shape(2, dtype=dtype, cached_dtype=dtype)
    if not CpuMla.supports(shape):
        pytest.skip("no compiled kernels; python kernels/compile_native.py")
    made, case = CpuMla(BackendRequirements(shape, 32, 25, 0, CPU)), MlaCase(shape, PREFILL, DECODE)
    assert made.prepare(case.tables.rows).num_prefill_tokens == 40 + 2
    assert case.error(made) <= 0.01


def test_the_scale_says_what_a_number_in_the_pages_stands_for() -> None:
    shape = mla_shape(2, cached_dtype=FP8, cached_scale=0.37)
    case = MlaCase(shape, [], DECODE)
    assert case.error(TorchMla(BackendRequirements(shape, 32, 25, 0, CPU))) <= 0.01
    kept = torch.cat([case.pages[case.tables.slots(row)] for row in range(len(DECODE))])
    cached = torch.cat([context[:start] for context, (start, _) in zip(case.contexts, DECODE, strict=True)])
    torch.testing.assert_close(kept.float() * 0.37, cached.float(), rtol=2**-4, atol=1e-3)


@pytest.mark.usefixtures("flashinfer_there")
@pytest.mark.parametrize("num_heads", [4, 16])
@pytest.mark.parametrize("page_size", [16, 64])
def test_every_token_of_a_short_append_is_a_row_of_our_kernel(num_heads: int, page_size: int) -> None:
    from plait_worker.attention.mla.triton_mla import TritonMla

    shape = mla_shape(num_heads)
    made = TritonMla(BackendRequirements(shape, page_size, 4096, 0, CPU))
    for prefill in ([], [(0, 40), (130, 2), (70, 33)]):
        case = MlaCase(shape, prefill, DECODE, page_size)
        step = made.prepare(case.tables.rows)
        assert step.num_prefill_tokens == 0
        assert step.decode_waits
        assert case.error(made) <= 0.02
