"""On a GPU a rehearsed kernel is not launched, is ready afterwards, and then computes what it should."""

from pathlib import Path

import pytest
import torch
from plait_kernels.norm import add_rms_norm
from plait_kernels.norm import reference as norm_reference

pytestmark = [pytest.mark.gpu, pytest.mark.acceptance("gpu")]


def test_a_rehearsed_kernel_needs_no_compiler_and_is_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import triton
    from plait_kernels.ahead import rehearsal

    told: list[bool] = []
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    monkeypatch.setattr(triton.knobs.compilation, "listener", lambda **compiled: told.append(compiled["cache_hit"]))
    # A width and type that no other test has: Triton keeps what a process has compiled.
    x, residual = torch.randn(2, 7, 1234, dtype=torch.float16, device="cuda")
    weight = torch.rand(1234, dtype=torch.float16, device="cuda")
    with rehearsal(2) as ready:
        add_rms_norm(x, residual, weight, 1e-6)
    assert (ready, told) == (["_add_rms_norm"], [False])
    given = add_rms_norm(x, residual, weight, 1e-6)
    assert told == [False]
    for one, right in zip(given, norm_reference.add_rms_norm(x, residual, weight, 1e-6), strict=True):
        torch.testing.assert_close(one, right, atol=2e-2, rtol=2e-2)
