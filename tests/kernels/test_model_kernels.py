"""The references compute what their papers say, in float32."""

import math

import pytest
import torch
from plait_kernels.activation import silu_mul
from plait_kernels.attention import attend, merge
from plait_kernels.backends import TABLE, Call
from plait_kernels.moe import GroupLimit, expert_mlps, sigmoid_group_top_k, softmax_group_top_k, softmax_top_k
from plait_kernels.norm import add_rms_norm, rms_norm
from plait_kernels.rope import apply_rope, rope_tables


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-8)])
def test_rms_norm_divides_by_the_root_mean_square(dtype: torch.dtype, tolerance: float) -> None:
    x, weight = torch.randn(5, 3, 96).to(dtype) * 30, torch.rand(96).to(dtype)
    exact = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 0.01).sqrt() * weight.double()
    assert rms_norm(x, weight, 0.01).dtype == dtype
    torch.testing.assert_close(rms_norm(x, weight, 0.01).double(), exact, rtol=2 * tolerance, atol=1e-6)


def test_rms_norm_of_zeros_is_zero() -> None:
    assert rms_norm(torch.zeros(2, 8), torch.ones(8), 1e-6).eq(0).all()


def test_add_rms_norm_gives_the_sum_on() -> None:
    x, residual, weight = torch.randn(4, 8), torch.randn(4, 8), torch.rand(8)
    normed, total = add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, rms_norm(x + residual, weight, 1e-6))


def test_rope_rotates_each_pair_by_its_angle() -> None:
    positions, frequencies = torch.tensor([0, 1, 7, 5000]), torch.tensor([1.0, 0.1, 0.01])
    x = torch.randn(4, 2, 6)
    as_complex = torch.complex(x[..., :3].double(), x[..., 3:].double())
    angles = positions[:, None].double() * frequencies.double()
    complex_rotated = as_complex * torch.polar(torch.ones_like(angles), angles)[:, None]
    rotated = apply_rope(x, *rope_tables(positions, frequencies))
    torch.testing.assert_close(
        rotated.double(), torch.cat((complex_rotated.real, complex_rotated.imag), -1), atol=1e-3, rtol=0
    )
    assert torch.equal(rotated[0], x[0])


@pytest.mark.parametrize(("head_dim", "device"), [(96, "cuda"), (100, "cuda"), (128, "cpu")])
def test_heads_that_no_gpu_kernel_takes_are_rotated_by_torch(head_dim: int, device: str) -> None:
    call = Call(torch.device(device), torch.bfloat16, head_dim)
    for op in ("rotate_heads", "rotate_and_store"):
        assert TABLE["plait_kernels.rope"][op].backend(call).module == "reference"


def test_rope_keeps_the_scale_and_the_dtype() -> None:
    x = torch.randn(3, 1, 8, dtype=torch.bfloat16)
    tables = rope_tables(torch.arange(3), torch.rand(4), scale=2.0)
    rotated = apply_rope(x, *tables)
    assert rotated.dtype == torch.bfloat16
    torch.testing.assert_close(rotated.float().norm(dim=-1), 2 * x.float().norm(dim=-1), rtol=0.01, atol=0)


def test_silu_mul_gates_the_second_half() -> None:
    gate, up = torch.randn(3, 5), torch.randn(3, 5)
    torch.testing.assert_close(silu_mul(torch.cat((gate, up), -1)), gate * torch.sigmoid(gate) * up)


def test_top_k_weights_are_probabilities_over_all_experts() -> None:
    logits = torch.tensor([[0.0, math.log(3), math.log(4)]])
    weights, experts = softmax_top_k(logits, 2, normalise=False)
    assert experts.tolist() == [[2, 1]]
    torch.testing.assert_close(weights, torch.tensor([[0.5, 0.375]]))
    torch.testing.assert_close(softmax_top_k(logits, 2, normalise=True)[0], torch.tensor([[4 / 7, 3 / 7]]))


def test_each_token_gets_its_own_experts_weighted() -> None:
    x, gate_up, down = torch.randn(9, 8), torch.randn(5, 12, 8), torch.randn(5, 8, 6)
    weights, experts = softmax_top_k(torch.randn(9, 5), 3, normalise=True)
    expected = torch.zeros(9, 8, dtype=torch.float64)
    for token in range(9):
        for weight, expert in zip(weights[token].double(), experts[token].tolist(), strict=True):
            hidden = silu_mul(gate_up[expert].double() @ x[token].double())
            expected[token] += weight * (down[expert].double() @ hidden)
    torch.testing.assert_close(expert_mlps(x, gate_up, down, weights, experts).double(), expected, atol=1e-4, rtol=1e-5)


def test_experts_without_tokens_cost_nothing_and_change_nothing() -> None:
    x, gate_up, down = torch.randn(2, 8), torch.randn(4, 12, 8), torch.randn(4, 8, 6)
    gate_up[0] = gate_up[3] = math.nan
    experts = torch.tensor([[1, 2], [2, 1]])
    assert expert_mlps(x, gate_up, down, torch.full((2, 2), 0.5), experts).isfinite().all()


def test_attention_hides_what_comes_later() -> None:
    q, k, v = torch.randn(3, 4, 8), torch.randn(7, 2, 8), torch.randn(7, 2, 8)
    out = attend(q, k, v, 0.5)
    k[6], v[6] = 100, 100
    changed = attend(q, k, v, 0.5)
    assert torch.equal(out[:2], changed[:2])
    assert not torch.equal(out[2], changed[2])


def test_query_heads_share_the_head_of_their_group() -> None:
    q, k, v = torch.randn(1, 4, 8), torch.randn(5, 2, 8), torch.randn(5, 2, 8)
    one_head = [attend(q[:, h : h + 1], k[:, h // 2, None], v[:, h // 2, None], 1.0) for h in range(4)]
    torch.testing.assert_close(attend(q, k, v, 1.0), torch.cat(one_head, 1))


def weigh(scores_THL: torch.Tensor, v_LHD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over part of a context, with its log-sum-exp to base 2; 0 and -inf for no position."""
    weights_THL = scores_THL.softmax(-1).nan_to_num(0.0)
    return torch.einsum("thl,lhd->thd", weights_THL, v_LHD), scores_THL.logsumexp(-1) / math.log(2)


def test_merged_parts_are_the_attention_over_the_whole() -> None:
    scores, v = torch.randn(5, 3, 9) * 30, torch.randn(9, 3, 4)
    scores[:2, :, :6] = -torch.inf  # two rows see nothing of the first part
    whole, whole_lse = weigh(scores, v)
    for first, second in [(slice(0, 6), slice(6, 9)), (slice(6, 9), slice(0, 6))]:
        merged, lse = merge(*weigh(scores[..., first], v[first]), *weigh(scores[..., second], v[second]))
        torch.testing.assert_close(merged, whole)
        torch.testing.assert_close(lse, whole_lse)


def test_an_empty_part_is_not_read() -> None:
    nothing, lse = torch.full((2, 3, 4), torch.nan), torch.full((2, 3), -torch.inf)
    merged, merged_lse = merge(nothing, lse, nothing, lse)
    assert torch.equal(merged, torch.zeros(2, 3, 4))
    assert torch.equal(merged_lse, lse)
    other, other_lse = torch.randn(2, 3, 4), torch.randn(2, 3)
    for merged, merged_lse in (merge(nothing, lse, other, other_lse), merge(other, other_lse, nothing, lse)):
        torch.testing.assert_close(merged, other)
        torch.testing.assert_close(merged_lse, other_lse)


def test_a_group_is_worth_its_best_expert_by_softmax_and_its_two_best_by_sigmoid() -> None:
    # Group 0 holds the best expert, group 1 the two best together.
    logits = torch.tensor([[3.0, -9.0, -9.0, 2.0, 1.9, -9.0]])
    one = GroupLimit(num_groups=2, num_kept=1)
    weights, ids = softmax_group_top_k(logits, 1, one, scale=2.0)
    assert ids.tolist() == [[0]]
    assert weights.item() == pytest.approx(2 * logits.softmax(-1)[0, 0].item())
    _, ids = sigmoid_group_top_k(logits, torch.zeros(6), 2, one, scale=1.0, normalise=True)
    assert sorted(ids[0].tolist()) == [3, 4]


def test_a_correction_bias_chooses_and_does_not_weigh() -> None:
    logits, bias = torch.tensor([[1.0, 0.0, -1.0]]), torch.tensor([0.0, 0.0, 9.0])
    weights, ids = sigmoid_group_top_k(logits, bias, 1, GroupLimit(1, 1), scale=1.0, normalise=False)
    assert ids.tolist() == [[2]]
    assert weights.item() == pytest.approx(torch.sigmoid(torch.tensor(-1.0)).item())
