"""The GPU samples the reference's tokens from the same logits, as often as their probabilities say."""

import pytest
import torch
from plait_kernels.sampling import Adjustments, Filters, adjust, adjust_logits, sample_filtered, sample_random, uniform
from plait_kernels.sampling import reference as plain
from plait_kernels.sampling.philox import uniform as plain_uniform
from plait_kernels.sampling.token_order import top_tokens
from torch import Tensor

pytestmark = [pytest.mark.gpu, pytest.mark.acceptance("gpu")]
NUM_ROWS = 300
# Exponentials differ in their last bits, and with them the ends of tokens and of what a filter keeps.
NEAR = 1e-6
LARGEST_DRAW = 1 - 2**-53
VOCABS = [7, 264, 4097, 151_936]
FILTERS = [(0, 1.0, 0.0), (1, 1.0, 0.0), (50, 1.0, 0.0), (0, 0.9, 0.0), (0, 1e-6, 0.0), (40, 0.8, 0.1), (0, 0.999, 0.0)]


def some_logits(vocab: int, spread: float, num_rows: int = NUM_ROWS) -> Tensor:
    """So coarse that values repeat, and with -0 and -inf among them."""
    logits = (torch.randn(num_rows, vocab, device="cuda") * spread).bfloat16()
    logits[:, 3] = -0.0
    logits[:, 5] = -torch.inf
    return logits


def draws(num_rows: int = NUM_ROWS) -> Tensor:
    values = torch.rand(num_rows, dtype=torch.float64, device="cuda")
    values[:2] = torch.tensor([0.0, LARGEST_DRAW])
    return values


def moved(uniform_S: Tensor, by: float) -> Tensor:
    return (uniform_S + by).clamp(0, LARGEST_DRAW)


def or_any_last(high_S: Tensor, uniform_S: Tensor, order_SV: Tensor) -> Tensor:
    """For a random number just below 1: the last token, as rounding of sums exceeds what follows the others."""
    return torch.where(uniform_S + NEAR >= 1, order_SV[:, -1], high_S)


def assert_between(low_S: Tensor, given_S: Tensor, high_S: Tensor, order_SV: Tensor) -> None:
    """Each token is one of two others, or between them, in an order of the vocabulary."""
    place_SV = order_SV.argsort(dim=1)
    low, given, high = (place_SV.gather(1, ids_S[:, None]) for ids_S in (low_S, given_S, high_S))
    assert bool((low <= given).all())
    assert bool((given <= high).all())


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("spread", [0.1, 1.0, 8.0])
@pytest.mark.parametrize(("top_k", "top_p", "min_p"), FILTERS)
def test_filtered_samples_are_the_references(vocab: int, spread: float, top_k: int, top_p: float, min_p: float) -> None:
    logits, uniform_S = some_logits(vocab, spread), draws()
    temperature = torch.full((NUM_ROWS,), 0.7, device="cuda")

    def keeping(more: float) -> Filters:
        return Filters(
            torch.full((NUM_ROWS,), top_k, device="cuda"),
            torch.full((NUM_ROWS,), top_p + more if top_p < 1 else top_p, device="cuda"),
            torch.full((NUM_ROWS,), min_p - more if min_p > 0 else min_p, device="cuda"),
        )

    given = sample_filtered(logits, temperature, keeping(0), uniform_S)
    low, high = (
        plain.sample_filtered(logits.float(), temperature, keeping(by), moved(uniform_S, by)) for by in (-NEAR, NEAR)
    )
    order = top_tokens(logits.float(), vocab)
    if (top_p, min_p) == (1.0, 0.0):
        high = or_any_last(high, uniform_S, order[:, : top_k or vocab])
    assert_between(low, given, high, order)
    assert bool(logits.gather(1, given[:, None]).isfinite().all())


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("spread", [0.1, 1.0, 8.0])
@pytest.mark.parametrize("min_p", [0.0, 0.2])
def test_random_samples_are_the_references(vocab: int, spread: float, min_p: float) -> None:
    logits, uniform_S = some_logits(vocab, spread), draws()
    temperature, min_ps = (torch.full((NUM_ROWS,), value, device="cuda") for value in (0.7, min_p))
    given = sample_random(logits, temperature, min_ps, uniform_S)
    low, high = (plain.sample_random(logits.float(), temperature, min_ps, moved(uniform_S, by)) for by in (-NEAR, NEAR))
    order = torch.arange(vocab, device="cuda").expand(NUM_ROWS, vocab)
    assert_between(low, given, or_any_last(high, uniform_S, order), order)
    assert bool(logits.gather(1, given[:, None]).isfinite().all())


def test_uniform_numbers_are_the_cpus() -> None:
    seeds = torch.tensor([0, 1, -1, 2**62 + 12345, -(2**63)]).repeat_interleave(4)
    indices = torch.tensor([0, 1, 2**32, 2**40 + 7]).repeat(5)
    assert torch.equal(uniform(seeds.cuda(), indices.cuda()).cpu(), plain_uniform(seeds, indices))


@pytest.mark.parametrize("is_filtered", [False, True])
def test_tokens_come_as_often_as_their_probabilities_say(is_filtered: bool) -> None:
    num, vocab = 100_000, 200
    logits = ((torch.randperm(vocab, device="cuda")[None] - 100) / 32).bfloat16()  # all different
    rows = logits.expand(num, vocab).contiguous()
    uniform_S = uniform(torch.full((num,), 42, device="cuda"), torch.arange(num, device="cuda"))
    ones = torch.ones(num, device="cuda")
    if is_filtered:
        filters = Filters(torch.full((num,), 100, device="cuda"), ones, 0 * ones)
        sampled = sample_filtered(rows, ones, filters, uniform_S)
        kept = logits.float().masked_fill(logits < logits.float().topk(100).values[:, -1:], -torch.inf)
    else:
        sampled = sample_random(rows, ones, 0 * ones, uniform_S)
        kept = logits.float()
    expected = kept[0].double().softmax(-1) * num
    counts = sampled.bincount(minlength=vocab)
    can_be = expected > 0
    assert int(counts[~can_be].sum()) == 0
    chi_square = float(((counts - expected)[can_be] ** 2 / expected[can_be]).sum())
    freedom = int(can_be.sum()) - 1
    assert chi_square < freedom + 5 * (2 * freedom) ** 0.5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("num_rows", [1, 256])
def test_adjusted_logits_are_the_references(dtype: torch.dtype, vocab: int, num_rows: int) -> None:
    """As float32 says, rounded once; the last bit of a float32 may be another, and with it the rounding."""
    logits = (torch.randn(num_rows, vocab + 8, device="cuda") * 8).to(dtype)[:, :vocab]
    counts = torch.randint(0, 7, (num_rows + 3, vocab), device="cuda", dtype=torch.int32)
    counts *= torch.rand(counts.shape, device="cuda") < 0.2
    num_listed = min(vocab, 1024)
    changes = Adjustments(
        counts_RV=counts,
        rows_S=torch.randperm(num_rows + 3, device="cuda")[:num_rows],
        penalties_S3=torch.rand(num_rows, 3, device="cuda") + 0.5,
        ends_S=torch.arange(1, num_rows + 1, device="cuda") * num_listed,
        ids_E=torch.cat([torch.randperm(vocab, device="cuda")[:num_listed] for _ in range(num_rows)]),
        bias_E=torch.rand(num_rows * num_listed, device="cuda") * 200 - 100,
        only_listed_S=torch.arange(num_rows, device="cuda") % 5 == 1,
    )
    given, expected = adjust_logits(logits, changes), adjust.adjust_logits(logits, changes)
    assert given.dtype == dtype
    step = torch.finfo(dtype).eps * expected.float().abs() + 1e-6
    assert bool(((given.float() - expected.float()).abs() <= step).all())
    assert float((given == expected).float().mean()) > 0.999
