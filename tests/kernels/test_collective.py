"""What the peer all-reduce is held to, and what it takes; `gpu/test_peer_all_reduce` runs the kernel."""

import re

import pytest
import torch
from plait_kernels.collective import Limits, add_partials_rms_norm, largest_logit, unsupported_reason
from plait_kernels.nvrtc import no_compiler_reason


def test_the_sum_of_ranks_and_residual_is_rounded_once() -> None:
    """Rounding after each rank's summand would lose the small ones: 256 + 1 is 256 in bfloat16."""
    partials = [torch.full((2, 8), value, dtype=torch.bfloat16) for value in (256.0, 1.0, 1.0)]
    residual, weight = torch.zeros(2, 8, dtype=torch.bfloat16), torch.full((8,), 3.0, dtype=torch.bfloat16)
    normed, total = add_partials_rms_norm(partials, residual, weight, 0.0)
    assert torch.equal(total, torch.full((2, 8), 258.0, dtype=torch.bfloat16))
    assert torch.equal(normed, torch.full((2, 8), 3.0, dtype=torch.bfloat16))


def test_the_lowest_of_equal_logits_is_the_largest() -> None:
    shards = [torch.tensor([[1.0, 3.0], [-0.0, -1.0]]), torch.tensor([[3.0, 2.0], [0.0, 4.0]])]
    assert largest_logit(shards).tolist() == [1, 3]


@pytest.mark.parametrize(
    ("world", "width", "dtype", "reason"),
    [
        (9, 4096, torch.bfloat16, "takes up to 8 ranks, not 9"),
        (2, 4096, torch.float32, r"takes bfloat16 or float16, not torch\.float32"),
        (2, 4100, torch.bfloat16, "takes widths that are a multiple of 8 up to 16384, not 4100"),
        (2, 16_392, torch.float16, "up to 16384, not 16392"),
    ],
)
def test_what_nccl_has_to_reduce_is_named(world: int, width: int, dtype: torch.dtype, reason: str) -> None:
    assert re.search(reason, unsupported_reason(world, width, dtype) or "")


@pytest.mark.parametrize("width", [8, 2880, 4096, 16_384])
def test_models_widths_are_taken_where_kernels_compile(width: int) -> None:
    assert unsupported_reason(8, width, torch.bfloat16) == no_compiler_reason()


def test_two_ranks_need_room_for_two_slots_of_one_peer() -> None:
    limits = Limits(max_rows=8192, width=4096, dtype=torch.bfloat16, max_blocks=132)
    assert limits.memory_bytes(2) == 2 * 8192 * 4096 * 2
    assert limits.memory_bytes(4) == 3 * limits.memory_bytes(2)
